"""Parsing of request bodies: null fields and error messages for values of the wrong type."""

import json
from typing import Any

import pytest

from headstart.server.apis.responses import ResponsesRequest
from headstart.server.body_reader import parse_body
from headstart.server.errors import BodyError
from headstart.server.schema import Body, ChatRequest, CompletionRequest, TokenizeRequest

ASKED: dict[type[Body], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
    CompletionRequest: {"prompt": "x"}, ResponsesRequest: {"input": "x"}, TokenizeRequest: {},
}  # fmt: skip
HI = ASKED[ChatRequest]


@pytest.mark.parametrize("model", ASKED)
def test_null_fields_equal_absent_fields(model: type[Body]) -> None:
    asked = ASKED[model]
    nulls = {field.alias or name: None for name, field in model.model_fields.items() if name not in asked}
    read = parse_body(json.dumps({**nulls, **asked, "other": None}).encode(), model)
    assert read.model_dump() == {**parse_body(json.dumps(asked).encode(), model).model_dump(), "other": None}
    for name in asked:
        with pytest.raises(BodyError, match=name):
            parse_body(json.dumps({name: None}).encode(), model)


@pytest.mark.parametrize(("model", "body", "says"), [
    (ChatRequest, HI | {"tool_choice": "maybe"}, "tool_choice is 'maybe', but must be 'none', 'auto' or 'required'"),
    (ChatRequest, HI | {"tool_choice": {"type": "x"}}, "tool_choice.type is 'x', but must be 'function'"),
    (ChatRequest, HI | {"tool_choice": {}}, "tool_choice.function is missing"),
    (ChatRequest, HI | {"response_format": "json"}, "response_format is 'json', but must be an object"),
    (ChatRequest, {"messages": ["x"]}, "messages.0 is 'x', but must be an object"),
    (ChatRequest, {"messages": [{"content": "x"}]}, "messages.0.role is missing"),
    (ChatRequest, HI | {"stop": [5]}, "stop.0 is 5, but must be a text"),
    (ChatRequest, HI | {"stop": 5}, "stop is 5, but must be a text or a list"),
    (ChatRequest, HI | {"stop": ["x"] * 300}, "stop has 300 elements, but may have at most 256"),
    (ChatRequest, HI | {"temperature": "hot"}, "temperature is 'hot', but must be a number"),
    (ChatRequest, HI | {"temperature": True}, "temperature is true, but must be a number"),
    (ChatRequest, HI | {"n": 1.5}, "n is 1.5, but must be a whole number"),
    (ChatRequest, HI | {"stream": []}, "stream is a list, but must be true or false"),
    (ChatRequest, HI | {"truncate_prompt_tokens": -5}, "truncate_prompt_tokens is -5, but must be at least -1"),
    (ChatRequest, {"messages": [{"role": "user", "contents": "x"}]}, "messages.0: a user message has no content"),
    (ChatRequest, [], "the body is a list, but must be an object"),
    (ResponsesRequest, {"input": []}, "input is empty"),
])  # fmt: skip
def test_errors_name_the_field_and_the_expected_type(model: type[Body], body: Any, says: str) -> None:
    with pytest.raises(BodyError) as raised:
        parse_body(json.dumps(body).encode(), model)
    assert str(raised.value).startswith(says)
