"""The official `openai` client against the running server."""

import json
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
from process import MODEL, QUESTION, WEATHER, Server

pytestmark = pytest.mark.slow  # a server process
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def client(openai_client: OpenAI) -> OpenAI:
    return openai_client


def chat(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, "max_tokens": 24} | options)


def test_list_and_retrieve_models(client: OpenAI) -> None:
    assert [each.id for each in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(NotFoundError, match="does not exist"):
        chat(client, model="other")


def test_streamed_and_whole_answers_are_equal(client: OpenAI) -> None:
    options = {"temperature": 0.8, "seed": 7, "max_tokens": 40}
    whole = chat(client, **options)
    assert whole.choices[0].message.model_fields_set >= {"role", "content", "refusal"}  # required, and may be null
    chunks = list(chat(client, **options, stream=True, stream_options={"include_usage": True}))
    pieces = [choice for chunk in chunks for choice in chunk.choices]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[0].message.content
    assert pieces[0].delta.role == "assistant"
    assert pieces[-1].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.model_extra["seed"] == 7
    assert whole.usage.model_extra["speculation"]["method"] == "eagle3"


def test_drafting_does_not_change_the_text(client: OpenAI) -> None:
    texts = set()
    for speculation in ({"mode": "off"}, {"mode": "auto"}, {"mode": "auto", "depth": 5}):
        answer = chat(client, temperature=1.0, seed=3, max_tokens=60, extra_body={"speculation": speculation})
        texts.add(answer.choices[0].message.content)
        drafted = answer.usage.model_extra["speculation"]["drafted"]
        assert drafted == 0 or speculation["mode"] == "auto"
        assert drafted > 0 or "depth" not in speculation
    assert len(texts) == 1


def test_n_choices_whole_and_streamed(client: OpenAI) -> None:
    options = {"n": 3, "temperature": 1.0, "seed": 5}
    whole = chat(client, **options)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    streamed = ["", "", ""]
    for chunk in chat(client, **options, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_chat_logprobs_whole_and_streamed(client: OpenAI) -> None:
    options = {"temperature": 0, "logprobs": True, "top_logprobs": 3, "max_tokens": 12}
    found = chat(client, **options).choices[0].logprobs
    assert found.model_fields_set == {"content", "refusal"}
    entries = found.content
    assert len(entries) == 12
    for entry in entries:
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy
        assert len(entry.top_logprobs) == 3
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    pieces = [choice for chunk in chat(client, **options, stream=True) for choice in chunk.choices]
    streamed = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content]
    assert [each.logprob for each in streamed] == [each.logprob for each in entries]
    with_text = [piece for piece in pieces if piece.delta.content]
    assert all(piece.logprobs for piece in with_text), "chunks with text have logprobs"


def test_completions_echo_and_logprobs(client: OpenAI) -> None:
    prompt = "The three primary colours are"
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=6, temperature=0, echo=True, logprobs=2, seed=1
    ).choices[0]
    assert answer.text.startswith(prompt)
    found = answer.logprobs
    assert "".join(found.tokens) == answer.text
    assert found.token_logprobs[0] is None
    assert all(value < 0 for value in found.token_logprobs[1:])
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
    chunks = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=6, temperature=0, echo=True, logprobs=2, seed=1, stream=True
    )
    streamed = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    assert [token for each in streamed for token in each.tokens] == found.tokens
    assert [offset for each in streamed for offset in each.text_offset] == found.text_offset


def test_prompt_logprobs_and_special_tokens(client: OpenAI) -> None:
    prompt = "<|im_start|>user\nHi<|im_end|>"
    answer = client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=2, echo=True, extra_body={"prompt_logprobs": 1}
    ).choices[0]
    assert answer.text.startswith(prompt)
    found = answer.model_extra["prompt_logprobs"]
    assert found[0] is None
    assert all(each["logprob"] <= 0 for entry in found[1:] for each in entry.values())


def test_prompts_as_lists_and_token_ids(client: OpenAI, server: Server) -> None:
    text = "Once upon a time"
    ids = server.post("/tokenize", prompt=text).json()["tokens"]
    options = {"model": MODEL, "max_tokens": 10, "temperature": 0.7, "seed": 4}
    one = client.completions.create(prompt=text, **options)
    many = client.completions.create(prompt=[ids, ids], extra_body={"return_token_ids": True}, **options)
    assert [choice.text for choice in many.choices] == [one.choices[0].text] * 2
    assert many.choices[1].model_extra["prompt_token_ids"] == ids
    tokens = many.choices[1].model_extra["token_ids"]
    assert server.post("/detokenize", tokens=tokens).json()["prompt"] == one.choices[0].text


def test_stop_strings_cut_the_text_exactly(client: OpenAI) -> None:
    options = {"temperature": 0, "max_tokens": 60}
    text = chat(client, **options).choices[0].message.content
    stop = text[20:26]
    whole = chat(client, **options, stop=[stop]).choices[0]
    assert whole.message.content == text[: text.index(stop)]
    assert whole.finish_reason == "stop"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chat(client, **options, stop=[stop], stream=True)]
    assert "".join(pieces) == whole.message.content


@pytest.mark.parametrize("stream", [False, True])
def test_json_schema(client: OpenAI, stream: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "seed": 2, "max_tokens": 100, "response_format": wanted}
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chat(client, **options, stream=True))
        else:
            text = chat(client, **options).choices[0].message.content
        assert set(json.loads(text)) == {"name", "age"}


def test_guided_choice_and_regex(client: OpenAI) -> None:
    assert chat(client, extra_body={"guided_choice": ["yes", "no"]}).choices[0].message.content in ("yes", "no")
    text = chat(client, extra_body={"structured_outputs": {"regex": "[0-9]{3}-[0-9]{4}"}}).choices[0].message.content
    assert len(text) == 8
    assert text[3] == "-"


NAMED = {"type": "function", "function": {"name": "get_weather"}}
ALLOWED = {"mode": "required", "tools": [NAMED]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", NAMED, {"type": "allowed_tools", "allowed_tools": ALLOWED}])
def test_forced_tool_calls(client: OpenAI, choice: Any, stream: bool) -> None:
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools = [TIME, {"type": "function", "function": WEATHER}]
    options = {"messages": question, "tools": tools, "tool_choice": choice, "max_tokens": 200, "seed": 1}
    options["parallel_tool_calls"] = False
    if stream:
        name, arguments, reasons = "", "", []
        for chunk in chat(client, **options, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                name += call.function.name or ""
                arguments += call.function.arguments or ""
            reasons.append(chunk.choices[0].finish_reason)
        reason = reasons[-1]
    else:
        answer = chat(client, **options).choices[0]
        (call,) = answer.message.tool_calls
        name, arguments, reason = call.function.name, call.function.arguments, answer.finish_reason
    assert reason == "tool_calls"
    assert name in ("get_weather", "get_time")
    if choice != "required":
        assert name == "get_weather"
        assert set(json.loads(arguments)) == {"city"}


def test_tools_that_are_not_allowed_are_not_in_the_prompt(client: OpenAI) -> None:
    tools, options = [TIME, {"type": "function", "function": WEATHER}], {"messages": QUESTION, "max_tokens": 1}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    some = chat(client, **options, tools=tools, tool_choice=allowed).usage.prompt_tokens
    assert some == chat(client, **options, tools=tools[1:]).usage.prompt_tokens


def test_tool_result_is_accepted(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:30"},
    ]
    assert chat(client, messages=messages, tools=[TIME]).choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_unforced_tool_call_in_hermes_format(client: OpenAI) -> None:
    """The default model's chat template has no tools: the server adds and parses the Hermes format."""
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    answer = chat(client, tools=[TIME], max_tokens=60, extra_body={"guided_choice": [call]}).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls[0].function.name == "get_time"
    assert answer.message.content is None


def test_developer_role_falls_back_to_system(client: OpenAI) -> None:
    said = []
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "Answer in one word."}, *QUESTION]
        said.append(chat(client, messages=messages, seed=1).choices[0].message.content)
    assert said[0] == said[1]
