"""Bodies as they are read: what is null, and what is said of a value of the wrong type."""

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
def test_null_is_what_was_not_said(model: type[Body]) -> None:
    asked = ASKED[model]
    nulls = {field.alias or name: None for name, field in model.model_fields.items() if name not in asked}
    read = parse_body(json.dumps({**nulls, **asked, "other": None}).encode(), model)
    assert read.model_dump() == {**parse_body(json.dumps(asked).encode(), model).model_dump(), "other": None}
    for name in asked:
        with pytest.raises(BodyError, match=name):
            parse_body(json.dumps({name: None}).encode(), model)


@pytest.mark.parametrize(("model", "body", "says"), [
    (ChatRequest, HI | {"tool_choice": "maybe"}, "tool_choice: Input should be 'none', 'auto' or 'required'"),
    (ChatRequest, HI | {"tool_choice": {"type": "x"}}, "tool_choice.type: Input should be 'function'"),
    (ChatRequest, HI | {"tool_choice": {}}, "tool_choice.function: Field required"),
    (ChatRequest, HI | {"response_format": "json"}, "response_format: Input should be an object"),
    (ChatRequest, {"messages": ["x"]}, "messages.0: Input should be an object"),
    (ChatRequest, {"messages": [{"content": "x"}]}, "messages.0.role: Field required"),
    (ChatRequest, HI | {"stop": [5]}, "stop.0: Input should be a valid string"),
    (ChatRequest, [], "the body: Input should be an object"),
    (ResponsesRequest, {"input": []}, "input: List should have at least 1 item"),
])  # fmt: skip
def test_the_place_and_the_type_are_named(model: type[Body], body: Any, says: str) -> None:
    with pytest.raises(BodyError) as told:
        parse_body(json.dumps(body).encode(), model)
    assert str(told.value).startswith(says)
