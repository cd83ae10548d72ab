"""The official `anthropic` client against the running server."""

import json
from typing import Any

import pytest
from process import CITY, MODEL, QUESTION, WEATHER, Server

anthropic = pytest.importorskip("anthropic")
pytestmark = pytest.mark.slow  # a server process
TOOL = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": CITY}


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


SAMPLED = {"seed": 1, "temperature": 0.8, "top_p": 1}


def options(**given: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": QUESTION, "max_tokens": 30, "extra_body": SAMPLED} | given


def test_streamed_and_whole_messages_are_equal(client: Any, server: Server) -> None:
    more = {"context_management": {"edits": []}, "thinking": {"type": "adaptive"}}  # as Claude Code sends it
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    whole = client.messages.create(**options(system=system, extra_body={**SAMPLED, **more}))
    with client.messages.stream(**options(system="Be brief.")) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == streamed.content[0].text == whole.content[0].text != ""
    assert streamed.stop_reason == whole.stop_reason == "max_tokens"
    assert streamed.usage.output_tokens == whole.usage.output_tokens == 30
    sizes = [each.usage.input_tokens + each.usage.cache_read_input_tokens for each in (whole, streamed)]
    count = client.messages.count_tokens(model=MODEL, messages=QUESTION, system="Be brief.").input_tokens
    assert sizes == [count, count]
    chat = [{"role": "system", "content": "Be brief."}, *QUESTION]
    said = server.post("/v1/chat/completions", messages=chat, max_tokens=30, **SAMPLED).json()
    assert said["choices"][0]["message"]["content"] == text  # the chat completions API has the same text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_tool_use_and_tool_results(client: Any, choice: Any) -> None:
    question = {"role": "user", "content": "What is the weather in Paris?"}
    asked = options(messages=[question], tools=[TOOL], max_tokens=80)
    asked["tool_choice"] = choice | {"disable_parallel_tool_use": True}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    (call,) = whole.content
    assert (call.type, call.name, whole.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert set(call.input) == {"city"}
    assert streamed.content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "12 C"}]}
    turns = [question, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**options(messages=turns, tools=[TOOL], max_tokens=4)).usage.output_tokens <= 4


def test_stop_sequences_and_prefill(client: Any) -> None:
    turns = [*QUESTION, {"role": "assistant", "content": "The three colours are red, blue"}]
    found = client.messages.create(**options(messages=turns, stop_sequences=["."], extra_body={"temperature": 0}))
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", ".")
    assert "." not in found.content[0].text


def test_output_config_constrains_to_json_schema(client: Any) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"]}
    wanted = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    text = client.messages.create(**options(output_config=wanted)).content[0].text
    assert json.loads(text)["n"] in range(1, 10)


def test_errors_map_to_the_clients_exceptions(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as found:
        client.messages.create(**options(model="claude"))
    assert found.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(**options(max_tokens=0))
