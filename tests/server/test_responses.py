"""OpenAI's Responses API through the official client."""

import json
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import Response
from process import MODEL, WEATHER, Server
from pydantic import BaseModel, Field

pytestmark = pytest.mark.slow  # a server process


class Person(BaseModel):
    """Schema of the structured output."""

    age: int = Field(ge=1, le=99)


@pytest.fixture
def client(openai_client: OpenAI) -> OpenAI:
    return openai_client


TOOL = {"type": "function", **WEATHER, "strict": True}
SAMPLED = {"seed": 1, "temperature": 1, "top_p": 1}  # not the model's recommended values


def options(**given: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Name three colours.", "max_output_tokens": 30, "extra_body": SAMPLED} | given


def test_streamed_and_whole_responses_are_equal(client: OpenAI, server: Server) -> None:
    whole = client.responses.create(**options(instructions="Be brief."))
    items = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Name three colours."}]
    events = list(client.responses.create(**options(input=items), stream=True))
    last = events[-1]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.response.output_text == whole.output_text != ""
    assert (last.type, whole.status) == ("response.incomplete", "incomplete")
    assert whole.incomplete_details.reason == "max_output_tokens"
    counted = client.responses.input_tokens.count(model=MODEL, input=items)
    assert counted.input_tokens == whole.usage.input_tokens
    assert counted.object == "response.input_tokens"
    assert whole.usage.output_tokens == last.response.usage.output_tokens == 30
    chat = [{"role": "system", "content": "Be brief."}, items[1]]
    said = server.post("/v1/chat/completions", messages=chat, max_tokens=30, **SAMPLED).json()
    assert said["choices"][0]["message"]["content"] == text  # the chat completions API has the same text
    Response.model_validate(whole.model_dump(exclude_none=True), strict=True)


def test_function_calls_and_their_outputs(client: OpenAI) -> None:
    asked = options(input="The weather in Paris?", tools=[TOOL], max_output_tokens=80)
    asked |= {"tool_choice": "required", "parallel_tool_calls": False}
    (call,) = client.responses.create(**asked).output
    assert set(json.loads(call.arguments)) == {"city"}
    with client.responses.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_response().output[0]
    assert streamed.arguments == call.arguments
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": TOOL["name"]}]}
    other = {"type": "function", "name": "other", "parameters": {"type": "object"}}
    answer = client.responses.create(**asked | {"tools": [other, TOOL], "tool_choice": allowed})
    assert (answer.output[0].arguments, answer.tool_choice.model_dump()) == (call.arguments, allowed)
    assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "12 C"}
    turns = [{"role": "user", "content": "The weather in Paris?"}, call, output]
    assert client.responses.create(**options(input=turns, tools=[TOOL], max_output_tokens=4)).usage.output_tokens


def test_structured_output(client: OpenAI) -> None:
    found = client.responses.parse(**options(text_format=Person, max_output_tokens=60))
    assert isinstance(found.output_parsed, Person)
