"""Tool calls in the forms that chat templates read."""

from typing import Any

import pytest

from headstart.server.schema import ChatRequest
from headstart.text.chat import ChatTemplate

USUAL = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}]{% endfor %}{{ m.tool_call_id }}{{ m.content }}|{% endfor %}"
)
NULL_CALL = "[{{ c.id }} {{ c.function.name + ' ' + c.function.arguments }}]"
NULL = (
    "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}" + NULL_CALL + "{% endfor %}"
    "{% else %}{{ m.tool_call_id }}{{ m.content }}{% endif %}|{% endfor %}"
)
TEXT = USUAL.replace("{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}")
REFUSAL = "{{ raise_exception('ids have nine letters') }}"
MISTRAL = "{% for m in messages if m.role == 'tool' and (m.tool_call_id | length) != 9 %}" + REFUSAL + "{% endfor %}"
SESSION: list[dict[str, Any]] = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "call_1", "function": {"name": "look", "arguments": {"at": "é"}}}
    ]},
    {"role": "tool", "tool_call_id": "call_1", "content": "blue"},
]  # fmt: skip


@pytest.mark.parametrize("source", [USUAL, NULL, TEXT])
def test_calls_are_written_whatever_form_the_template_reads(source: str) -> None:
    template = ChatTemplate(source)
    assert template.writes_calls
    assert template.render(SESSION) == 'Look.|[call_1 look {"at": "é"}]' + "|call_1blue|"


def test_ids_have_nine_letters_where_the_template_demands_it() -> None:
    template = ChatTemplate(MISTRAL + USUAL)
    _, call, result, _ = template.render(SESSION).split("|")
    assert result == call[1:10] + "blue"
    nameless = [{**SESSION[1], "tool_calls": [{"function": SESSION[1]["tool_calls"][0]["function"]}] * 2}]
    nameless += [{"role": "tool", "content": each} for each in ("blue", "grey")]
    call, first, second, _ = template.render(nameless).split("|")
    assert (first, second) == (call[1:10] + "blue", call[call.index("]") + 2 :][:9] + "grey")


def test_calls_stand_one_by_one_where_the_template_demands_it() -> None:
    calls = [{"id": each, "function": {"name": each, "arguments": {}}} for each in ("a", "b")]
    session = [
        {**SESSION[1], "content": "I look. ", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": each, "content": each * 2} for each in ("b", "a", "c")), SESSION[0],
    ]  # fmt: skip
    single = "{% for m in messages if m.tool_calls and m.tool_calls | length > 1 %}" + REFUSAL + "{% endfor %}"
    assert ChatTemplate(single + USUAL).render(session) == "[a a {}]I look. |aaa|[b b {}]|bbb|ccc|Look.|"
    twice = [{**SESSION[1], "tool_calls": [{"function": calls[0]["function"]}] * 2}]
    twice += [{"role": "tool", "content": "7"}] * 2
    assert ChatTemplate(single + USUAL).render(twice) == "[ a {}]|7|[ a {}]|7|"


def test_user_may_speak_after_results_where_the_template_refuses_it() -> None:
    session = [*SESSION, {"role": "user", "content": "Thanks."}]
    usual = 'Look.|[call_1 look {"at": "é"}]|call_1blue|'
    assert ChatTemplate(USUAL).render(session) == usual + "Thanks.|"
    refuses = "{% for m in messages %}{% if m.role == 'user' and %s %}" + REFUSAL + "{% endif %}{% endfor %}"
    strict = refuses.replace("%s", "loop.index0 and messages[loop.index0 - 1].role == 'tool'")
    assert ChatTemplate(strict + USUAL).render(session) == usual + "OK.|Thanks.|"
    assert ChatTemplate(strict + USUAL).render(SESSION) == usual
    assert ChatTemplate(refuses.replace("%s", "not loop.first") + USUAL).render(SESSION) == usual


def test_template_without_calls_says_so() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")
    assert not template.writes_calls
    assert template.render(SESSION) == "userLook.assistanttoolblue"


def test_developer_messages_are_not_dropped() -> None:
    known = "{% for m in messages if m.role in ('developer', 'user') %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(known).takes_developer
    dropped = "{# developer #}{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    assert not ChatTemplate(dropped).takes_developer
    assert not ChatTemplate("{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}").takes_developer


def test_late_system_messages_are_noticed() -> None:
    every = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    assert ChatTemplate(every).takes_late_system
    check = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    assert not ChatTemplate(every.replace("{{ m.role }}", check)).takes_late_system
    drops = "{{ messages[0].content }}{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    assert not ChatTemplate(drops).takes_late_system


def test_functions_have_descriptions_and_parameters() -> None:
    body = {"messages": SESSION, "tools": [{"function": {"name": "look", "description": None}}]}
    [tool] = ChatRequest.model_validate(body).functions
    assert list(tool["function"]) == ["name", "description", "parameters"]
    assert tool["function"]["description"] == "" and tool["function"]["parameters"]["properties"] == {}
