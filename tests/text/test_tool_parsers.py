"""Tool-call and reasoning parsers: events are independent of the splits of the text, and no text is lost."""

# ruff: noqa: RUF001  (the bars of DeepSeek's markers are U+FF5C)

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from headstart import registry
from headstart.errors import UsageError
from headstart.text.parsers import Arguments, Content, Event, Reasoning, ToolCall, format_in, make_parser, merge_events
from headstart.text.parsers._tags import argument_types, convert_to_json

PROPERTIES = {
    "text": {"type": "string"}, "count": {"type": "integer"}, "ratio": {"type": "number"}, "deep": {"type": "boolean"},
    "items": {"type": "array"}, "options": {"$ref": "#/$defs/options"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "level": {"enum": [1, 2]},
}  # fmt: skip
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"options": {"type": "object"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "search", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
]
FORMATS = [
    "deepseek_v3", "deepseek_v31", "deepseek_v32", "gemma4", "glm45", "harmony", "hermes", "json", "kimi_k2", "lfm2",
    "minimax_m2", "mistral", "pythonic", "qwen3_coder",
]  # fmt: skip
WHOLE = ("json", "pythonic")
"""Formats without markers: the whole answer is calls."""
MARKED = [name for name in FORMATS if name not in WHOLE]
TYPED = ("glm45", "qwen3_coder", "minimax_m2")
"""Formats whose values have the types of the tool's schema."""
NAMED = ("gemma4", "pythonic", "lfm2", "deepseek_v32")
"""Formats whose argument names are identifiers."""
TRICKY = {
    "text": 'say "hi" \\ {[</tool_call> <tool_call>} \n\t é 🙂 中文 <｜tool▁call▁end｜> ``` end',
    "count": -3, "ratio": 0.5, "deep": True, "items": [1, {"a": "}]"}, []], "options": {"x": {"y": None}}, "note": None,
    "level": 2,
}  # fmt: skip


def parse(pieces: Any, name: str | None, **options: Any) -> list[Event]:
    parser = make_parser(name, TOOLS, **options)
    return merge_events([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def check(text: str, name: str | None, **options: Any) -> list[Event]:
    """Events of `text`, checked to be the same character by character and for every fifth split into two."""
    whole = parse([text], name, **options)
    assert parse(text, name, **options) == whole
    for cut in range(1 + len(text) % 5, len(text), 5):
        assert parse([text[:cut], text[cut:]], name, **options) == whole, text[:cut]
    return whole


def calls(events: list[Event]) -> list[tuple[str, Any]]:
    texts = {event.index: event.text for event in events if isinstance(event, Arguments)}
    return [(event.name, json.loads(texts[event.index])) for event in events if isinstance(event, ToolCall)]


def content(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def tagged(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def gemma(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f'<|"|>{key}<|"|>:{gemma(each)}' for key, each in value.items()) + "}"
    return "[" + ",".join(map(gemma, value)) + "]" if isinstance(value, list) else json.dumps(value)


def dsml(function: str, arguments: Any) -> str:
    out = f'<｜DSML｜invoke name="{function}">\n'
    for key, value in arguments.items():
        string = str(isinstance(value, str)).lower()
        out += f'<｜DSML｜parameter name="{key}" string="{string}">{tagged(value)}</｜DSML｜parameter>\n'
    return out + "</｜DSML｜invoke>\n"


def minimax(function: str, arguments: Any) -> str:
    pairs = "".join(f'<parameter name="{k}">{tagged(v)}</parameter>\n' for k, v in arguments.items())
    return f'<invoke name="{function}">\n{pairs}</invoke>\n'


def glm(function: str, arguments: Any) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{tagged(v)}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{function}\n{pairs}</tool_call>"


def qwen(function: str, arguments: Any) -> str:
    pairs = "".join(f"<parameter={k}>\n{tagged(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={function}>\n{pairs}</function>\n</tool_call>"


def python(function: str, arguments: Any) -> str:
    return f"{function}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"


def gemma_call(function: str, arguments: Any) -> str:
    return f"<|tool_call>call:{function}{{{','.join(f'{k}:{gemma(v)}' for k, v in arguments.items())}}}<tool_call|>"


BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
WRITERS: dict[str, tuple[str, Any, str, str]] = {
    "hermes": ("", '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>', "\n", ""),
    "json": ("", '{{"name": "{}", "parameters": {}}}', "; ", ""),
    "deepseek_v3": (CALLS, f"{BEGIN}function{SEPARATOR}{{}}\n```json\n{{}}\n```{END}", "\n", CALLS_END),
    "deepseek_v31": (CALLS, f"{BEGIN}{{}}{SEPARATOR}{{}}{END}", "", CALLS_END),
    "mistral": ("", "[TOOL_CALLS]{}[ARGS]{}", "", ""),
    "harmony": ("", "<|start|>assistant<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>",
                "", ""),
    "kimi_k2": ("<|tool_calls_section_begin|>",
                "<|tool_call_begin|>functions.{}:12<|tool_call_argument_begin|>{}<|tool_call_end|>",
                "", "<|tool_calls_section_end|>"),
    "deepseek_v32": ("<｜DSML｜function_calls>\n", dsml, "", "</｜DSML｜function_calls>"),
    "minimax_m2": ("<minimax:tool_call>\n", minimax, "", "</minimax:tool_call>"),
    "pythonic": ("[", python, ", ", "]"),
    "lfm2": ("<|tool_call_start|>[", python, ", ", "]<|tool_call_end|>"),
    "gemma4": ("", gemma_call, "", ""),
    "glm45": ("", glm, "\n", ""),
    "qwen3_coder": ("", qwen, "\n", ""),
}  # fmt: skip
"""Text before the calls, a call, text between and after the calls. A format string gets the arguments as JSON."""


def write(name: str, listed: list[tuple[str, dict[str, Any]]]) -> str:
    """Tool calls as text in a format."""
    before, one, between, after = WRITERS[name]
    if isinstance(one, str):
        texts = [one.format(function, json.dumps(arguments, ensure_ascii=False)) for function, arguments in listed]
    else:
        texts = [one(function, arguments) for function, arguments in listed]
    return before + between.join(texts) + after


def test_available_formats() -> None:
    assert registry.available("tool_formats") == FORMATS
    assert registry.available("reasoning_formats") == ["gemma4", "harmony", "mistral", "think"]
    with pytest.raises(UsageError, match="hermes"):
        make_parser("hermse")


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_several_calls_are_parsed(name: str) -> None:
    listed: list[tuple[str, dict[str, Any]]] = [("search", TRICKY), ("now", {}), ("search", {"text": "北京"})]
    events = check(write(name, listed), name)
    assert calls(events) == listed
    assert content(events) == ""


@pytest.mark.parametrize("name", MARKED)
def test_text_around_calls_is_content(name: str) -> None:
    first, second = write(name, [("search", {"text": "x"})]), write(name, [("now", {})])
    events = check(f"Let me <b>look</b>.\n\n{first}\nBetween.\n{second} Done.\n", name)
    assert calls(events) == [("search", {"text": "x"}), ("now", {})]
    kinds = [type(event) for event in events]
    assert kinds == [Content, ToolCall, Arguments, Content, ToolCall, Arguments, Content]
    assert content(events) == "Let me <b>look</b>.\n" + "\nBetween." + " Done.\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        "Plain text, no call.\n",
        "a < b, <tool, </tool_call>, {braces} [1] <｜tool▁sep｜> \n\n<tool_cal",
        "Use <tool_call> tags: <tool_call>\n</tool_call> <tool_call>{}</tool_call>",
        '{"answer": 42, "name": "search"}',
        "[1, 2]",
        "[",
        " \n ",
        "<function=other> <parameter=x>",
        "<think> is a word here",
    ],
)
def test_text_without_calls_is_content(name: str, text: str) -> None:
    events = check(text, name)
    assert events == ([Content(text)] if text else [])
    assert check("x" + text, name, reasoning="think") == [Content("x" + text)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_truncated_calls_keep_their_text(name: str) -> None:
    before = "" if name in WHOLE else "Look: "
    text = before + write(name, [("search", {"text": 'é "q" {', "count": 12})])
    complete = parse([text], name)
    assert isinstance(complete[-1], Arguments)
    for end in range(len(text)):
        events = parse([text[:end]], name)
        assert parse(text[:end], name) == events
        assert content(events) == (before if ToolCall(0, "search") in events else text[:end])
        if events and isinstance(events[-1], Arguments):
            # A possible beginning of an end tag is part of the value when the text ends there.
            assert complete[-1].text.startswith(events[-1].text.split("<")[0].removesuffix("\\n").rstrip())


@pytest.mark.parametrize("name", FORMATS)
def test_calls_truncated_before_their_name_are_not_content(name: str) -> None:
    before = "" if name in WHOLE else "Look: "
    text = before + write(name, [("search", {"count": 12}), ("now", {})])
    parser_type, num_dropped = registry.find("tool_formats", name).PARSER, 0
    marks = [line + mark for mark in (*parser_type.opens, *parser_type.ends) for line in ("", "\n")]
    for end in range(len(before), len(text)):
        parser = parser_type(TOOLS)
        events = merge_events(parser.push(text[:end]) + parser.finish(is_cut_off=True))
        shown, is_named = content(events), ToolCall(0, "search") in events
        has_begun = any(mark in text[:end] for mark in parser_type.opens)
        num_dropped += has_begun and not is_named
        if is_named or has_begun:
            rest = shown.removeprefix(before)  # possibly the beginning of a marker
            assert not rest or any(mark.startswith(rest) for mark in marks), text[:end]
        else:
            assert shown == text[:end]
    assert bool(num_dropped) == (name not in WHOLE)


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(data=st.data(), name=st.sampled_from(FORMATS))
def test_random_arguments_and_splits(data: st.DataObject, name: str) -> None:
    word = st.text(st.characters(codec="utf-8", exclude_characters="\r"), max_size=12)
    if name in TYPED:
        kinds = {"text": word, "count": st.integers(), "deep": st.booleans()}
        arguments: Any = st.fixed_dictionaries({}, optional=kinds)
    else:
        key = st.from_regex("[a-z_]{1,8}", fullmatch=True) if name in NAMED else word
        arguments = st.dictionaries(key, st.recursive(word | st.none() | st.integers(), st.lists), max_size=4)
    listed = data.draw(st.lists(st.tuples(st.sampled_from(["search", "now"]), arguments), min_size=1, max_size=3))
    if name in TYPED:
        listed = [("search", arguments) for _, arguments in listed]  # `now` has no parameters
    text = write(name, listed)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    events = parse([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], name)
    assert calls(events) == listed
    assert content(events) == ""


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<function=search>", "<function=", "<parameter=text>", "</parameter>", "</function>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<think>", "</think>", "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json", "```", "\n", " ", "search",
    '{"name": "search"', "<|tool_call>call:", "<tool_call|>", '<|"|>', "search{text:", "<|start|>assistant",
    "<|channel|>", "analysis", "final", " to=functions.search", "<|message|>", "<|end|>", "<|call|>", "[TOOL_CALLS]",
    "[ARGS]",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_call_start|>", "search(", "text=", ")", "'", "<minimax:tool_call>", '<invoke name="', "</invoke>",
    '<parameter name="', '">', "<｜DSML｜function_calls>", '<｜DSML｜invoke name="', '<｜DSML｜parameter name="',
    ' string="true', ', "arguments": ', '{"a": 1}', "}", "[", "]", '"', "\\", "{", ";", ",", "x",
]  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(
    parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12),
    name=st.sampled_from(FORMATS),
    reasoning=st.sampled_from([None, "think"]),
)
def test_events_are_independent_of_splits_for_any_text(parts: list[str], name: str, reasoning: str | None) -> None:
    text = "".join(parts)
    events = parse([text], name, reasoning=reasoning)
    assert parse(text, name, reasoning=reasoning) == events
    assert parse(parts, name, reasoning=reasoning) == events
    if name == "harmony":
        return  # its content is between special tokens
    if all(isinstance(event, Content) for event in events) and not (reasoning and "</think>" in text):
        assert content(events) == text.removeprefix("<think>" if reasoning and text == "<think>" else "")


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_drops_further_calls(name: str) -> None:
    text = write(name, [("search", {"text": "a"}), ("now", {})])
    assert len(calls(check(text, name))) == 2
    assert calls(check(text, name, one_call=True)) == [("search", {"text": "a"})]
    assert content(check(text, name, one_call=True)) == content(check(text, name))


@pytest.mark.parametrize("name", [*FORMATS, None])
@pytest.mark.parametrize("reasoning", [None, "think"])
def test_held_back_text_is_shorter_than_a_marker(name: str | None, reasoning: str | None) -> None:
    longest = len("\n<｜tool▁calls▁begin｜>\n<｜tool▁call▁begin｜>")
    text = "The <tool_x> < \n\n<｜tool▁calls▁begin｜> {a: [1]} <th \n<tool_cal and <functio=x> done. " * 3
    parser = make_parser(name, TOOLS, reasoning)
    shown = ""
    for at, character in enumerate(text, 1):
        shown += content(parser.push(character))
        held = text[len(shown) : at]
        assert len(held) < longest
        assert not held or held[0] in "<\n["


@pytest.mark.parametrize("opened", [False, True])
def test_think_reasoning(opened: bool) -> None:
    start = "" if opened else "<think>"
    call = write("hermes", [("now", {})])
    options = {"reasoning": "think", "reasoning_opened": opened}
    events = check(f"{start}\nFirst <tool_call> é\n\nthen.\n</think>\n\nAnswer </think>. {call}", "hermes", **options)
    assert events[:2] == [Reasoning("First <tool_call> é\n\nthen."), Content("Answer </think>. ")]
    assert calls(events) == [("now", {})]
    assert check(start + "cut </thi", None, **options) == [Reasoning("cut </thi")]
    assert check("<think>\n\n</think>\n\nAnswer", None, **options) == [Content("Answer")]
    if not opened:
        assert check("Answer <think>x</think>", None, **options) == [Content("Answer <think>x</think>")]


@pytest.mark.parametrize(("template", "tools", "thoughts"), [
    ("{{ '<|start|>assistant<|channel|>analysis<|message|>' + x + '<|end|>' }}", "harmony", "harmony"),
    ("{{ '<|channel>thought\\n' }}{{ '<|tool_call>call:' + f + '{' }}{{ '}<tool_call|>' }}", "gemma4", "gemma4"),
    ("{{ '[THINK]' + x + '[/THINK]' }}{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral", "mistral"),
    ("{% set dsml_token = '｜DSML｜' %}<think>", "deepseek_v32", "think"),
    ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}", "kimi_k2", None),
    ("{% set begin = '<minimax:tool_call>' %}{{ '<invoke name=\"' }}", "minimax_m2", None),
    ("<|im_start|>system\nList of tools: [", "lfm2", None),
    ("<tool_call>{{ name }}<arg_key>{{ k }}</arg_key>", "glm45", None),
    ("[func_name1(params_name1=params_value1)]", "pythonic", None),
])  # fmt: skip
def test_formats_are_detected_in_templates(template: str, tools: str, thoughts: str | None) -> None:
    assert format_in(template, "tool_formats") == tools
    assert format_in(template, "reasoning_formats") == thoughts


def test_harmony_channels() -> None:
    """Output of gpt-oss after `<|start|>assistant`: reasoning, commentary, a call, an answer."""
    thought, end, call = "<|channel|>analysis<|message|>Hm <b> é?<|end|>", "<|end|>", '{"text": "a\\"b"}'
    said = "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    options = {"reasoning": "harmony", "reasoning_opened": True}
    called = f"<|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>{call}<|call|>"
    expected = [Reasoning("Hm <b> é?"), Content("I look."), ToolCall(0, "search"), Arguments(0, call)]
    assert check(thought + said + called, "harmony", **options) == expected
    assert check(thought + said + called, None, **options) == expected
    final = "<|start|>assistant<|channel|>final<|message|>Done: <|x|>."
    assert check(thought + final, None, **options) == [Reasoning("Hm <b> é?"), Content("Done: <|x|>.")]
    assert check(thought + final + "<|return|>", None, **options) == [Reasoning("Hm <b> é?"), Content("Done: <|x|>.")]
    stray = "<|channel|>commentary" + thought + final
    assert check(stray, None, **options) == [Reasoning("Hm <b> é?"), Content("Done: <|x|>.")]
    first = " to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    assert check(first, "harmony", **options) == [ToolCall(0, "now"), Arguments(0, "{}")]
    built_in = "<|channel|>analysis to=python code<|message|>1 + 1<|call|>"
    assert check(built_in, "harmony", **options) == [Content(built_in)]
    assert check("plain " + end, "harmony", **options) == [Content("plain " + end)]
    inner = f"<|channel|>final<|message|>{write('hermes', [('now', {})])}<|return|>"
    assert check(inner, "hermes", **options) == [ToolCall(0, "now"), Arguments(0, "{}")]


@pytest.mark.parametrize("name", ["gemma4", "mistral"])
def test_reasoning_of_gemma4_and_mistral(name: str) -> None:
    begin, close = {"gemma4": ("<|channel>thought", "<channel|>"), "mistral": ("[THINK]", "[/THINK]")}[name]
    text = f"{begin}\nFirst.\n{close}" + write(name, [("now", {})])
    assert check(text, name, reasoning=name) == [Reasoning("First."), ToolCall(0, "now"), Arguments(0, "{}")]


def test_pythonic_variants() -> None:
    text = """[search(text='it\\'s "x" \\n \\u00e9', count=-3, ratio=1e-3, deep=true, items=(1, None,),"""
    text += " options={'a': [True]})]"
    wanted = {
        "text": 'it\'s "x" \n é', "count": -3, "ratio": 1e-3, "deep": True, "items": [1, None],
        "options": {"a": [True]},
    }  # fmt: skip
    assert calls(check(text, "pythonic")) == [("search", wanted)]
    for other in ("[nobody(a=1)]", "[search]", "[1, 2]", "search(text='a')", "[search (x) for x in y]"):
        assert check(other, "pythonic") == [Content(other)]
    events = check("<|tool_call_start|>[f(a='b'), 3]<|tool_call_end|>", "lfm2")
    assert events == [ToolCall(0, "f"), Arguments(0, '{"a": "b"}')]
    assert check("<|tool_call_start|>[f(a=b)]", "lfm2") == [ToolCall(0, "f"), Arguments(0, '{"a": "b"}')]


@pytest.mark.parametrize("word", ["1٢", "-1e999"])
@pytest.mark.parametrize(("name", "call"), [
    ("gemma4", "<|tool_call>call:f{{a:{}}}<tool_call|>"), ("lfm2", "<|tool_call_start|>[f(a={})]<|tool_call_end|>"),
])  # fmt: skip
def test_numbers_outside_json_become_strings(name: str, call: str, word: str) -> None:
    assert calls(check(call.format(word), name)) == [("f", {"a": word})]


def object_call(arguments: str) -> str:
    return f'{{"name": "search", "arguments": {arguments}}}'


JSON_CALLS: dict[str, tuple[str, Any]] = {
    "json": ("json", object_call), "mistral array": ("mistral", lambda a: f"[TOOL_CALLS][{object_call(a)}]"),
    **{name: (name, partial(WRITERS[name][1].format, "search"))
       for name in ("hermes", "mistral", "kimi_k2", "harmony", "deepseek_v3", "deepseek_v31")},
}  # fmt: skip
"""Format, and the text of a call with these arguments."""
ODD: list[tuple[str, list[Any]]] = [
    ('{"a": 1}', [{"a": 1}]), ("null", [{}]), ("None", [{}]), ('""', [{}]), ("[]", [{}]),
    (json.dumps('{"a": "é"}'), [{"a": "é"}]), (json.dumps(json.dumps('{"a": 1}')), [{"a": 1}]),
    ('[{"a": 1}]', [{"a": 1}]), ('[{"a": 1}, {"a": 2}]', [{"a": 1}, {"a": 2}]), ('{"a": 1,}', [{"a": 1}]),
    ("{'a': True, b: [None, 'x\"', 1,],}", [{"a": True, "b": [None, 'x"', 1]}]), (r'{"a": "x\d"}', [{"a": r"x\d"}]),
    ('{"a": [1, 2}', [{"a": [1, 2]}]), ('{"a": 1]', [{"a": 1}]), ('{"a" 1}', [{"a": None}]),
    ('{"a": NaN}', [{"a": "NaN"}]), ('{"a": 1e999, "b": 007}', [{"a": "1e999", "b": "007"}]),
    (r'{"a": "\u12"}', [{"a": r"\u12"}]), ("7", [{"INVALID_JSON": "7"}]), ('"plain"', [{"INVALID_JSON": '"plain"'}]),
    ("[1]", [{"INVALID_JSON": "[1]"}]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("call", JSON_CALLS)
@pytest.mark.parametrize(("arguments", "wanted"), ODD, ids=range(len(ODD)))
def test_arguments_become_one_object_per_call(call: str, arguments: str, wanted: list[Any]) -> None:
    name, write_call = JSON_CALLS[call]
    events = check(write_call(arguments), name)
    assert calls(events) == [("search", each) for each in wanted]
    assert content(events).strip() == ""


@pytest.mark.parametrize("call", JSON_CALLS)
@pytest.mark.parametrize("strays", ["}", "}}", " }\n}"])
def test_excess_braces_are_dropped(call: str, strays: str) -> None:
    name, write_call = JSON_CALLS[call]
    text = write_call('{"a": 1}')
    for end in ('{"a": 1}}', '{"a": 1}'):  # after the call's object, after its arguments
        at = text.find(end)
        if at >= 0:
            events = check(text[: at + len(end)] + strays + text[at + len(end) :], name)
            assert calls(events) == [("search", {"a": 1})]
            assert content(events).strip() == ""


@pytest.mark.parametrize("call", [name for name in JSON_CALLS if name not in ("json", "mistral array")])
def test_several_calls_between_one_pair_of_markers(call: str) -> None:
    name, write_call = JSON_CALLS[call]
    if call == "hermes":
        one, two = object_call('{"a": 1}'), object_call('{"a": 2}')
        texts = [f"<tool_call>\n{x}\n</tool_call>" for x in (f"{one}\n{two}", f"[{one}, {two}]", f"{one}, {two}}}")]
    else:
        texts = [write_call('{"a": 1}\n{"a": 2}'), write_call('[{"a": 1}, {"a": 2}]')]
    for text in texts:
        events = check(text, name)
        assert calls(events) == [("search", {"a": 1}), ("search", {"a": 2})]
        assert content(events).strip() == ""


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKED)
def test_arguments_of_damaged_calls_are_objects(name: str) -> None:
    """With an extra character in a call, an announced call before further text has an object as arguments."""
    text = write(name, [("search", {"text": "é", "count": 12})])
    for at in range(1, len(text) + 1):
        for piece in ("}", "]", ")", "\n", '"'):
            damaged = text[:at] + piece + text[at:] + " Done."
            events = parse([damaged], name)
            assert parse(damaged, name) == events
            if any(isinstance(event, ToolCall) for event in events) and "Done." in content(events):
                assert all(isinstance(arguments, dict) for _, arguments in calls(events)), (damaged, events)


def test_mistral_variants() -> None:
    listed = [("search", {"text": "a"}), ("now", {})]
    array = '[TOOL_CALLS][{"name": "search", "arguments": {"text": "a"}, "id": "x1"}, {"name": "now", "arguments": {}}]'
    assert calls(check(array, "mistral")) == listed
    assert content(check("Look: " + array + " so.", "mistral")) == "Look:  so."
    plain = '[TOOL_CALLS]search{"text": "a"}[TOOL_CALLS]now[CALL_ID]id1[ARGS]{}'
    assert calls(check(plain, "mistral")) == listed
    broken = '[TOOL_CALLS][{"name": "now", "arguments": {}}, 3]'
    assert check(broken, "mistral") == [ToolCall(0, "now"), Arguments(0, "{}"), Content(" 3]")]


def test_hermes_variants() -> None:
    def one(body: str) -> list[Event]:
        return check(f"<tool_call>{body}</tool_call>", "hermes")

    assert calls(one('{"arguments": {"a": "b"}, "name": "f"}')) == [("f", {"a": "b"})]
    assert calls(one('{"id": 7, "name": "f", "arguments": {"a": 1}, "x": [{}]}')) == [("f", {"a": 1})]
    assert calls(one('{"name": "f"}')) == [("f", {})]
    assert calls(one('{"name": "f", "arguments": {"a": 1}')) == [("f", {"a": 1})]  # the last brace is missing
    assert calls(one('{"name": "f", "arguments": {"a": "line\nbreak"}}')) == [("f", {"a": "line\nbreak"})]
    assert one('{"name": "f", "arguments": {"a": 1]}}')[1:] == [Arguments(0, '{"a": 1}')]
    assert content(one('{"name": 3, "arguments": {}}')) == '<tool_call>{"name": 3, "arguments": {}}</tool_call>'
    events = check('<tool_call>{"name": "f", "arguments": {}}, and text', "hermes")
    assert events == [ToolCall(0, "f"), Arguments(0, "{}"), Content(", and text")]
    events = check('<tool_call>oops <tool_call>{"name": "f", "arguments": {}}</tool_call>', "hermes")
    assert events == [Content("<tool_call>oops "), ToolCall(0, "f"), Arguments(0, "{}")]


CALL = '{"name": "search", "arguments": {"text": "a"}}'


@pytest.mark.parametrize("text", [
    CALL, "```json\n" + json.dumps(json.loads(CALL), indent=2) + "\n```", f"```\n{CALL}\n```\n", f"[{CALL}]",
    "{{" + CALL[1:-1] + "}}}",
])  # fmt: skip
def test_calls_of_qwen_coder_without_tags(text: str) -> None:
    """Output of Qwen2.5-Coder 0.5B and 1.5B with their own chat template."""
    for count, written in ((1, text), (2, f"{text}\n{text}")):
        events = check(written, "hermes")
        assert calls(events) == [("search", {"text": "a"})] * count
        assert not content(events)
    assert check(f"{CALL}\n</tool_call>", "hermes") == check(CALL, "hermes")


@pytest.mark.parametrize("text", [
    CALL.replace("search", "add_numbers"), '{"name": "search"}', '{"name": "search", "age": 3, "arguments": {}}',
    "```json\n[1, 2]\n```", "```python\nprint(1)\n```", f"Example: {CALL}",
])  # fmt: skip
def test_json_without_a_known_tool_is_content(text: str) -> None:
    assert check(text, "hermes") == [Content(text)]
    assert make_parser("hermes").push(CALL) == [Content(CALL)]


def test_json_variants() -> None:
    listed = [("search", {"text": "a;b"}), ("now", {})]
    array = '[{"name": "search", "arguments": {"text": "a;b"}}, {"name": "now", "parameters": {}}]'
    assert calls(check(array, "json")) == listed
    assert content(check(array + "\n", "json")) == ""
    tag = '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}'
    assert calls(check(tag, "json")) == [("now", {})]
    events = check('{"name": "now", "parameters": {}} and text', "json")
    assert events == [ToolCall(0, "now"), Arguments(0, "{}"), Content(" and text")]
    for text in ('{"name": "nobody", "parameters": {}}', '{"name": "now"}', '{"name": "now", "parameters'):
        assert check(text, "json") == [Content(text)]


def test_qwen3_coder_variants() -> None:
    bare = "<function=search>\n<parameter=count>\n007\n</parameter>\n<parameter=deep>True</parameter>\n</tool_call>"
    assert calls(check(bare, "qwen3_coder")) == [("search", {"count": 7, "deep": True})]
    code = "\n  if a <b>:\n    return '</function>'\n"
    text = f"<tool_call><function=search><parameter=text>\n{code}\n</parameter></function></tool_call>"
    assert calls(check(text, "qwen3_coder")) == [("search", {"text": code})]
    junk = "<tool_call><function=now>junk</function></tool_call>"
    assert check(junk, "qwen3_coder")[:2] == [ToolCall(0, "now"), Arguments(0, "{}")]
    assert content(check(junk, "qwen3_coder")) == ""
    unknown = "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>"
    assert calls(check(unknown, "qwen3_coder")) == [("f", {"a": "1"})]


def test_glm45_variants() -> None:
    tight = "<arg_key>path</arg_key> <arg_value>a b</arg_value><arg_key>n</arg_key><arg_value>5</arg_value>"
    assert calls(check(f"<tool_call>ls {tight} </tool_call>", "glm45")) == [("ls", {"path": "a b", "n": 5})]


@pytest.mark.parametrize(("text", "types", "value"), [
    ("5", {"integer"}, 5), ("5.0", {"integer"}, 5), ("5.5", {"integer"}, "5.5"), ("1e3", {"number"}, 1000.0),
    ("nan", {"number"}, "nan"), ("+7", {"number"}, 7), ("TRUE", {"boolean"}, True), ("yes", {"boolean"}, "yes"),
    ("None", {"null", "string"}, None), ("null", {"string"}, "null"), ("{'a': True}", {"object"}, {"a": True}),
    ("[1", {"array"}, "[1"), ("5", {"string", "integer"}, 5), (" x ", {"any"}, " x "), ('{"a": 1}', {"any"}, {"a": 1}),
])  # fmt: skip
def test_values_are_converted_to_declared_types(text: str, types: set[str], value: Any) -> None:
    found = json.loads(convert_to_json(text, frozenset(types)))
    assert found == value and type(found) is type(value)


def test_argument_types_of_a_schema() -> None:
    assert argument_types(TOOLS, "search", "note") == {"string", "null"}
    assert argument_types(TOOLS, "search", "level") == {"integer"}
    assert argument_types(TOOLS, "search", "options") == {"object"}
    unknown = (TOOLS, "search", "other"), (TOOLS, "now", "x"), ((), "f", "x")
    assert not any(argument_types(*each) for each in unknown)
    unusual: dict[str, Any] = {
        "none": {"type": None}, "choices": {"anyOf": None}, "number": {"oneOf": 5}, "values": {"enum": None},
        "types": {"type": ["null", {}]},
    }  # fmt: skip
    for properties in (unusual, [], None):
        tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
        assert {name: argument_types(tools, "f", name) for name in unusual} == {
            name: {"null"} if name == "types" and properties else frozenset() for name in unusual
        }
