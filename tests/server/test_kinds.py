"""Requests of common clients: unknown nested members, sentinels, hosted tools, answers as history."""

import json
from typing import Any

import pytest
from process import MODEL, Server

from headstart.server.apis import messages, ollama, responses
from headstart.server.body_reader import call_arguments
from headstart.server.errors import BodyError
from headstart.server.prepare import _message, constraint_of
from headstart.server.schema import ChatRequest, CompletionRequest, Message, ignored_fields_header

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
MAKE: dict[str, Any] = {
    "chat": lambda **more: ChatRequest.model_validate({"messages": HI, **more}),
    "messages": lambda **more: messages.chat_of(
        messages.MessagesRequest.model_validate({"model": "m", "max_tokens": 4, "messages": HI, **more})
    ),
    "responses": lambda **more: responses.chat_of(responses.ResponsesRequest.model_validate({"input": "hi", **more})),
    "ollama": lambda **more: ollama.chat_of(
        ollama.OllamaChatRequest.model_validate({"model": "m", "messages": HI, **more})
    ),
}


def ignored(api: str, **more: Any) -> str:
    return ignored_fields_header(MAKE[api](**more)).get("X-Ignored-Fields", "")


NESTED: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "x": 1}}},
     "response_format.json_schema.x"),
    ("chat", {"tools": [{**FUNCTION, "x": 1}]}, "tools.x"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools.function.x"),
    ("chat", {"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ("chat", {"messages": [{"role": "user", "content": "hi", "x": 1}]}, "messages.x"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
     "messages.content.x"),
    ("chat", {"speculation": {"x": 1}}, "speculation.x"),
    ("chat", {"structured_outputs": {"x": 1}}, "structured_outputs.x"),
    ("chat", {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "f"}, "x": 1}},
     "tool_choice.x"),
    ("responses", {"reasoning": {"summary": "auto"}}, "reasoning.summary"),
    ("responses", {"text": {"x": 1}}, "text.x"),
    ("responses", {"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
    ("responses", {"input": [{"role": "user", "content": "a", "x": 1}]}, "input.x"),
    ("responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "x": 1}]}]},
     "input.content.x"),
    ("responses", {"tools": [{"type": "function", "name": "f", "x": 1}]}, "tools.x"),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 99}}, "thinking.budget_tokens"),
    ("messages", {"output_config": {"x": 1}}, "output_config.x"),
    ("messages", {"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages.x"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
     "messages.content.x"),
    ("messages", {"tools": [{"name": "f", "input_schema": SCHEMA, "x": 1}]}, "tools.x"),
    ("ollama", {"messages": [{"role": "user", "content": "a", "x": 1}]}, "messages.x"),
    ("ollama", {"tools": [{**FUNCTION, "x": 1}]}, "tools.x"),
    ("ollama", {"options": {"x": 1}}, "x"),
]  # fmt: skip


@pytest.mark.parametrize(("api", "more", "name"), NESTED, ids=[f"{api}-{name}" for api, _, name in NESTED])
def test_unknown_nested_members_are_listed(api: str, more: dict[str, Any], name: str) -> None:
    assert ignored(api, **more) == name


@pytest.mark.parametrize(
    "more",
    [{"response_format": {"type": "text", "schema": SCHEMA}}, {"structured_outputs": {"structural_tag": "x"}},
     {"messages": [{"role": "assistant", "content": "a", "prefix": True}]},
     {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}],
)  # fmt: skip
def test_nested_members_that_change_the_text_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="schema") if "response_format" in more else pytest.raises(BodyError):
        ignored("chat", **more)


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_schema_is_read_from_both_places(kind: str) -> None:
    for more in ({"schema": SCHEMA}, {"json_schema": {"schema": SCHEMA}}):
        spec = constraint_of(ChatRequest.model_validate({"messages": HI, "response_format": {"type": kind, **more}}))
        assert spec is not None and spec.plain == SCHEMA


SENTINELS: list[tuple[str, str, Any]] = [
    *((api, "seed", -1) for api in ("chat", "messages", "responses")),
    *(("chat", name, -1) for name in ("max_tokens", "max_completion_tokens")),
    *(("chat", name, "") for name in ("model", "reasoning_effort", "tool_choice", "guided_regex", "guided_grammar")),
    ("chat", "response_format", {}), ("chat", "guided_choice", []), ("responses", "max_output_tokens", -1),
    ("responses", "tool_choice", ""), ("responses", "model", ""), ("ollama", "options", {"seed": -1}),
    ("ollama", "options", {"num_predict": -1}), ("ollama", "options", {"num_predict": 0}), ("ollama", "format", ""),
    ("ollama", "format", {}), ("ollama", "options", None), ("chat", "tools", None),
]  # fmt: skip


@pytest.mark.parametrize(("api", "name", "value"), SENTINELS)
def test_sentinels_mean_the_default(api: str, name: str, value: Any) -> None:
    assert MAKE[api](**{name: value}).model_dump() == MAKE[api]().model_dump()


HOSTED = ["web_search", "code_interpreter", "custom", "file_search", "mcp", "local_shell"]


@pytest.mark.parametrize("kind", HOSTED)
def test_hosted_tools_are_left_out_and_named(kind: str) -> None:
    hosted = {"type": kind, "name": "h"}
    flat = {"type": "function", "name": "f", "parameters": SCHEMA}
    assert f"tools.{kind}" in ignored("chat", tools=[FUNCTION, hosted]).split(", ")
    assert f"tools.{kind}" in ignored("responses", tools=[flat, hosted]).split(", ")
    if kind != "custom":  # in Anthropic's API it is a tool of the client
        assert f"tools.{kind}" in ignored("messages", tools=[{"name": "f"}, hosted]).split(", ")
    for choice in ({"type": kind}, {"type": "custom", "name": "h"}):
        with pytest.raises((BodyError, ValueError)):
            MAKE["responses"](tools=[flat, hosted], tool_choice=choice)
        with pytest.raises(ValueError):
            MAKE["chat"](tools=[FUNCTION, hosted], tool_choice=choice)


FIELDS: list[tuple[str, Any, bool]] = [
    ("verbosity", "low", False), ("verbosity", "medium", True), ("min_p", 0.1, True), ("logit_bias", {"1": 1}, True),
    ("typical_p", 0.5, False), ("mirostat", 2, False), ("guided_regex", "a", True), ("stop", ["x"], True),
    ("metadata", {"a": "b"}, True), ("seed", -7, True), ("top_k", -1, True), ("use_beam_search", True, False),
    ("regex", "a", False), ("chat_template", "x", False), ("service_tier", "auto", True),
]  # fmt: skip
PLACES = {("responses", "verbosity"): "text"}
"""Object that contains a field in an API."""


@pytest.mark.parametrize("api", MAKE)
@pytest.mark.parametrize(("name", "value", "served"), FIELDS)
def test_field_is_served_or_refused_alike_in_all_apis(api: str, name: str, value: Any, served: bool) -> None:
    more = {name: value}
    if (place := PLACES.get((api, name))) is not None:
        more = {place: more}
    elif api == "ollama":
        more = {"options": more}
    try:
        assert (ignored(api, **more) == "") is served
    except BodyError as error:
        assert not served and name in error.message


BROKEN = ['{"city": "Os', "", "null", "[1]", '"x"', "{}}", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 1500, '{"a": 1e999}']


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_invalid_call_arguments_are_accepted_as_history(text: str) -> None:
    wanted = {} if text in ("", "null") else {"INVALID_JSON": text}
    assert call_arguments(text) == wanted
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    read = _message(Message.model_validate({"role": "assistant", "content": None, "tool_calls": [call]}))
    assert read["tool_calls"][0]["function"]["arguments"] == wanted
    json.dumps(wanted, allow_nan=False).encode()


@pytest.mark.slow
@pytest.mark.parametrize(("forced", "limit"), [(True, 3), (True, 24), (True, 60), (False, 24)])
def test_answers_of_every_api_are_accepted_as_history(server: Server, limit: int, forced: bool) -> None:
    """Answers complete or cut by max_tokens, with and without tool calls."""
    note = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
    function = {"name": "weather", "description": "d", "parameters": note}

    def answer(path: str, **body: Any) -> Any:
        found = server.post(path, model=MODEL, **body)
        assert found.status_code == 200, found.text
        assert "x-ignored-fields" not in found.headers, found.headers
        return found.json()

    chat = {"max_tokens": limit, "tools": [{"type": "function", "function": function}], "seed": 1}
    choice = {"tool_choice": "required"} if forced else {}
    decided = choice | {"response_format": {"type": "json_object"}} if forced else {}  # as instructor sends them
    message = answer("/v1/chat/completions", messages=HI, **chat, **decided)["choices"][0]["message"]
    assert not (forced and limit > 3) or message["tool_calls"][0]["function"]["name"] == "weather"
    results = [{"role": "tool", "tool_call_id": c["id"], "content": "x"} for c in message.get("tool_calls") or ()]
    answer("/v1/chat/completions", messages=[*HI, message, *results, *HI], **chat)

    reply = {"max_output_tokens": limit, "tools": [{"type": "function", **function}], "seed": 1}
    items = answer("/v1/responses", input=HI, **reply, **choice)["output"]
    output = {"type": "function_call_output", "output": "x"}
    outputs = [{**output, "call_id": item["call_id"]} for item in items if "call_id" in item]
    answer("/v1/responses", input=[*HI, *items, *outputs, *HI], **reply)

    turn = {"max_tokens": limit, "tools": [{"name": "weather", "input_schema": note}], "seed": 1}
    choice = {"tool_choice": {"type": "any"}} if forced else {}
    parts = answer("/v1/messages", messages=HI, **turn, **choice)["content"]
    used = [{"type": "tool_result", "tool_use_id": p["id"], "content": "x"} for p in parts if p["type"] == "tool_use"]
    said = {"role": "user", "content": [*used, {"type": "text", "text": "go on"}]}
    answer("/v1/messages", messages=[*HI, {"role": "assistant", "content": parts}, said], **turn)

    own = {"stream": False, "tools": chat["tools"], "options": {"num_predict": limit, "seed": 1}}
    choice = {"tool_choice": "required"} if forced else {}
    message = answer("/api/chat", messages=HI, **own, **choice)["message"]
    answer("/api/chat", messages=[*HI, message, *HI], **own)


def test_completions_accept_sentinels() -> None:
    plain = CompletionRequest.model_validate({"prompt": "x"})
    given = {"seed": -1, "max_tokens": -1, "stop": None, "suffix": None, "n": None, "best_of": None}
    assert CompletionRequest.model_validate({"prompt": "x", **given}).model_dump() == plain.model_dump()
