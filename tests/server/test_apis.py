"""All APIs: errors in each API's own shape, cancellation on disconnect, API keys and the time limit."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from inside import serve_llm
from process import MODEL, Server

from headstart.api import LLM

pytestmark = pytest.mark.slow  # a server process
ASK = [{"role": "user", "content": "Hi"}]
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
MESSAGE = {"model": MODEL, "messages": ASK, "max_tokens": 4}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, OLLAMA, GENERATE = "/v1/responses", "/api/chat", "/api/generate"
RESPONSE = {"model": MODEL, "input": "Hi", "max_output_tokens": 4}
OLLAMA_CHAT = {"model": MODEL, "messages": ASK, "options": {"num_predict": 4}}
NAMED, SEARCH = {"type": "tool", "name": "w"}, {"type": "web_search"}
ABSENT = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "absent"}}]}
CALLS = {"role": "assistant"}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}, "strict": True}}
BAD: list[tuple[str, dict[str, Any], int, str]] = [
    (TEXT, {}, 400, "prompt"),
    (TEXT, {"prompt": 5}, 400, "prompt"),
    (TEXT, {"prompt": ""}, 400, "empty"),
    (TEXT, {"prompt": []}, 400, "empty"),
    (TEXT, {"prompt": [-1]}, 400, "outside"),
    (TEXT, {"prompt": [10**9]}, 400, "outside"),
    (TEXT, {"prompt": "x" * 200_000}, 400, "context"),
    (TEXT, {"prompt": "x", "model": "no-such"}, 404, "no-such"),
    (TEXT, {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    (TEXT, {"prompt": "x", "max_tokens": 2.5}, 400, "max_tokens"),
    (TEXT, {"prompt": "x", "temperature": -0.1}, 400, "temperature"),
    (TEXT, {"prompt": "x", "temperature": 10**400}, 400, "temperature"),
    (TEXT, {"prompt": "x", "max_tokens": 10**400}, 400, "max_tokens"),
    (TEXT, {"prompt": "x", "logit_bias": {"1": 10**400}}, 400, "logit_bias"),
    (TEXT, {"prompt": "x", "stop_token_ids": [2**40], "min_tokens": 1}, 400, "stop_token_ids"),
    (TEXT, {"prompt": ["x"] * 400}, 400, "400 texts"),
    (TEXT, {"prompt": "x", "n": 200}, 400, "n is 200"),
    (TEXT, {"prompt": "x", "logprobs": 100}, 400, "logprobs"),
    (TEXT, {"prompt": "x", "seed": -(2**63) - 1}, 400, "seed"),
    (TEXT, {"prompt": "x", "logit_bias": {"a": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "x", "logit_bias": {"²": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "x", "logit_bias": {"999999": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": [1], "suffix": "y"}, 400, "token ids"),
    (TEXT, {"prompt": "x", "speculation": {"mode": "fast"}}, 400, "speculation.mode"),
    (TEXT, {"prompt": "x", "guided_regex": "("}, 400, "regex"),
    (TEXT, {"prompt": "x", "guided_grammar": "start: nothing"}, 400, "grammar"),
    (TEXT, {"prompt": "x", "guided_choice": ["a"], "guided_regex": "a"}, 400, "several"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hi"}, 400, "messages"),
    (CHAT, {"messages": ASK, "max_completion_tokens": 0}, 400, "max_completion_tokens is 0, but must be at least 1"),
    (CHAT, {"messages": ASK, "logprobs": True, "top_logprobs": 99}, 400, "top_logprobs is 99"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
    (CHAT, {"messages": ASK, "top_logprobs": 2}, 400, "logprobs"),
    (CHAT, {"messages": ASK, "tool_choice": "required"}, 400, "tools"),
    (CHAT, {"messages": ASK, "tool_choice": {"type": "allowed_tools", "allowed_tools": ABSENT}}, 400, "'absent'"),
    (CHAT, {"messages": ASK, "response_format": {"type": "json_schema"}}, 400, "schema"),
    (CHAT, {"messages": [*ASK, CALLS | {"tool_calls": [{"type": "custom", "custom": {}}]}]}, 400,
     "messages.1.tool_calls.0.function is missing"),
    (CHAT, {"messages": [*ASK, CALLS | {"tool_calls": [{"function": {"name": ""}}]}]}, 400,
     "messages.1.tool_calls.0.function.name is empty"),
    (CHAT, {"messages": ASK, "response_format": {"type": "yaml"}}, 400, "response_format"),
    ("/tokenize", {}, 400, "exactly one"),
    ("/detokenize", {"tokens": [-1]}, 400, "outside"),
    (MESSAGES, {}, 400, "model"),
    (MESSAGES, MESSAGE | {"model": "no-such"}, 404, "no-such"),
    (MESSAGES, {"model": MODEL, "messages": ASK}, 400, "max_tokens"),
    (MESSAGES, MESSAGE | {"max_tokens": 0}, 400, "max_tokens"),
    (MESSAGES, MESSAGE | {"messages": []}, 400, "messages"),
    (MESSAGES, MESSAGE | {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role"),
    (MESSAGES, MESSAGE | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "is no image"),
    (MESSAGES, MESSAGE | {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400,
     "messages.0.content.0.text is missing"),
    (MESSAGES, MESSAGE | {"tools": [{"type": "web_search_20250305", "name": "w"}], "tool_choice": NAMED}, 400,
     "no tools that are functions"),
    (MESSAGES, MESSAGE | {"tool_choice": {"type": "any"}}, 400, "tools"),
    (MESSAGES, MESSAGE | {"messages": [*ASK, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, 400,
     "messages.1.content.0: a block of type tool_use has no name"),
    (MESSAGES, MESSAGE | {"mcp_servers": [{"url": "x"}]}, 400, "mcp_servers"),
    (MESSAGES, MESSAGE | {"stop_sequences": "x"}, 400, "stop_sequences"),
    (MESSAGES, MESSAGE | {"n": 2}, 400, "n is not"),
    (MESSAGES, MESSAGE | {"mirostat": 2}, 400, "mirostat"),
    (COUNT, {"model": MODEL}, 400, "messages"),
    (RESPONSES, {}, 400, "input"),
    (RESPONSES, RESPONSE | {"model": "no-such"}, 404, "no-such"),
    (RESPONSES, RESPONSE | {"max_output_tokens": 0}, 400, "max_output_tokens"),
    (RESPONSES, RESPONSE | {"previous_response_id": "resp_1"}, 400, "keeps no responses"),
    (RESPONSES, RESPONSE | {"background": True}, 400, "background"),
    (RESPONSES, RESPONSE | {"input": [{"role": "user"}]}, 400, "input.0.content is missing"),
    (RESPONSES, RESPONSE | {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, 400,
     "input.0: a part of type 'input_text' has no text"),
    (MESSAGES, MESSAGE | {"output_format": {"type": "json_schema"}}, 400, "output_format is not supported"),
    (RESPONSES, RESPONSE | {"tools": [SEARCH], "tool_choice": SEARCH}, 400, "web_search"),
    (RESPONSES, RESPONSE | {"input": [{"type": "item_reference", "id": "x"}]}, 400, "input.0"),
    (RESPONSES, RESPONSE | {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input_image"),
    (RESPONSES, RESPONSE | {"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "text.format.schema"),
    (RESPONSES, RESPONSE | {"tool_choice": "required"}, 400, "tools"),
    (RESPONSES, RESPONSE | {"input": [{"type": "function_call"}]}, 400, "input.0.name is missing"),
    (RESPONSES, RESPONSE | {"input": [{"type": "function_call_output"}]}, 400, "input.0.output is missing"),
    (RESPONSES, RESPONSE | {"tools": [WEATHER]}, 400, "tools.0: a tool of type function has no name"),
    (OLLAMA, {}, 400, "model"),
    (OLLAMA, OLLAMA_CHAT | {"model": "no-such"}, 404, "no-such"),
    (OLLAMA, OLLAMA_CHAT | {"format": "yaml"}, 400, "format"),
    (OLLAMA, OLLAMA_CHAT | {"options": {"mirostat": 2}}, 400, "mirostat"),
    (OLLAMA, OLLAMA_CHAT | {"options": {"temperature": -1}}, 400, "temperature"),
    (OLLAMA, OLLAMA_CHAT | {"options": {"num_predict": "x"}}, 400, "num_predict is 'x'"),
    (OLLAMA, OLLAMA_CHAT | {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, 400, "text only"),
    (OLLAMA, OLLAMA_CHAT | {"logprobs": True}, 400, "logprobs"),
    (GENERATE, {"model": MODEL, "prompt": "x", "context": [1]}, 400, "context"),
    (GENERATE, {"model": MODEL, "prompt": "x", "tools": [WEATHER]}, 400, "/api/chat"),
    (GENERATE, {"model": MODEL, "prompt": "x", "raw": True, "system": "y"}, 400, "system"),
    ("/api/show", {"model": "no-such"}, 404, "no-such"),
    ("/api/pull", {"model": "no-such"}, 404, "no-such"),
    ("/api/push", {"model": MODEL}, 404, "nothing at /api/push"),
]  # fmt: skip
LONG: dict[str, dict[str, Any]] = {
    MESSAGES: MESSAGE | {"max_tokens": 1900, "stream": True, "ignore_eos": True},
    RESPONSES: RESPONSE | {"max_output_tokens": 1900, "stream": True, "ignore_eos": True},
    OLLAMA: OLLAMA_CHAT | {"options": {"num_predict": 1900, "ignore_eos": True}},
}


def error_in(path: str, body: Any) -> str:
    """Checks the shape of an error of the path's API; returns its message."""
    if path.startswith("/api/"):
        assert set(body) == {"error"}
        return str(body["error"])
    error = body["error"]
    if path.startswith(MESSAGES):
        assert set(body) == {"type", "error"}
        assert body["type"] == "error"
        assert set(error) == {"type", "message"}
    else:
        assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


def test_errors_name_the_field_in_each_apis_own_shape(server: Server) -> None:
    for path, body, status, says in BAD:
        answer = server.post(path, **body)
        assert answer.status_code == status, (path, body, answer.text)
        assert says in error_in(path, answer.json()), (path, body)
        assert "Traceback" not in answer.text
    wrong = server.post(CHAT, messages=ASK, logprobs=True, top_logprobs=99)
    assert wrong.json()["error"]["param"] == "top_logprobs"
    named: list[tuple[str, dict[str, Any]]] = [
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("speculation.events", {"speculation": {"events": True}}),
        ("speculation", {"speculation": {"mode": "off", "depth": 2}}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"messages": 1}}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "absent"}}}),
        ("messages.0.content.0", {"messages": [{"role": "user", "content": [{"type": "file"}]}]}),
    ]
    for name, body in named:
        assert server.post(CHAT, **{"messages": ASK, **body}).json()["error"]["param"] == name
    for path in LONG:
        content = server.client.post(path, content=b"{", headers={"Content-Type": "application/json"})
        assert "JSON" in error_in(path, content.json())
        bare = server.client.post(path, content=b"{}", headers={"Origin": "https://page.example"})
        assert (bare.status_code, "JSON" in error_in(path, bare.json())) == (415, True)
        assert server.client.post(path, content=b"{}").status_code == (400 if path.startswith("/api/") else 415)


def test_one_conversation_has_the_same_prompt_in_every_api(server: Server) -> None:
    """A conversation with calls, results and a refusal may go on through another API; `strict` is in no prompt."""
    function, arguments = WEATHER["function"], {"city": "Oslo"}
    called = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(arguments)}}
    item = {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": json.dumps(arguments)}
    no, thanks = "I cannot.", {"role": "user", "content": "Thanks."}
    chat = [
        *ASK, {"role": "assistant", "content": [{"type": "refusal", "refusal": no}]}, thanks,
        {"role": "assistant", "tool_calls": [called, {"function": {"name": "get_weather"}}]},
        {"role": "tool", "tool_call_id": "c", "content": "12"},
    ]  # fmt: skip
    responses = [
        *ASK, {"role": "assistant", "content": [{"type": "refusal", "refusal": no}]}, thanks,
        item, {"type": "function_call", "call_id": "d", "name": "get_weather"},
        {"type": "function_call_output", "call_id": "c", "output": "12"},
    ]  # fmt: skip
    uses = [{"type": "tool_use", "id": "c", "name": "get_weather", "input": each} for each in (arguments, {})]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "12"}
    anthropic = [
        *ASK, {"role": "assistant", "content": no}, thanks,
        {"role": "assistant", "content": uses}, {"role": "user", "content": [result]},
    ]  # fmt: skip
    ollama = [
        *ASK, {"role": "assistant", "content": no}, thanks,
        {"role": "assistant", "tool_calls": [
            {"function": {"name": "get_weather", "arguments": each}} for each in (arguments, {})
        ]},
        {"role": "tool", "content": "12"},
    ]  # fmt: skip
    tool = {"name": "get_weather", "input_schema": function["parameters"], "strict": True}
    flat = {"type": "function", **function}
    asked = OLLAMA_CHAT | {"messages": ollama, "tools": [WEATHER], "stream": False}
    whole = server.post("/tokenize", messages=chat, tools=[WEATHER]).json()
    counts = [
        server.post(CHAT, messages=chat, tools=[WEATHER], max_tokens=1).json()["usage"]["prompt_tokens"],
        server.post(RESPONSES + "/input_tokens", input=responses, tools=[flat]).json()["input_tokens"],
        server.post(COUNT, model=MODEL, messages=anthropic, tools=[tool]).json()["input_tokens"],
        server.post(OLLAMA, **asked).json()["prompt_eval_count"],
    ]  # fmt: skip
    assert set(counts) == {whole["count"]}
    prompt = server.post("/detokenize", tokens=whole["tokens"]).json()["prompt"]
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in prompt
    twice = server.post(RESPONSES, **RESPONSE, messages=ASK, max_tokens=9)
    assert set(twice.headers["X-Ignored-Fields"].split(", ")) == {"messages", "max_tokens"}
    for path, text in (("/api/embed", {"input": "x"}), ("/api/embeddings", {"prompt": "x"})):
        assert server.post(path, model=MODEL, **text, colour="red").headers["X-Ignored-Fields"] == "colour"


@pytest.mark.parametrize("length", [8_300, 100_000])
def test_prompt_beyond_the_context_is_a_context_error_that_agents_know(server: Server, length: int) -> None:
    long = "x " * length
    asked = [{"role": "user", "content": long}]
    bodies = {
        TEXT: {"prompt": long}, CHAT: {"messages": asked, "stream": True}, MESSAGES: MESSAGE | {"messages": asked},
        RESPONSES: {"input": long}, OLLAMA: OLLAMA_CHAT | {"messages": asked},
    }  # fmt: skip
    for path, body in bodies.items():
        answer = server.post(path, **body)
        assert (answer.status_code, "prompt is too long" in error_in(path, answer.json())) == (400, True), answer.text
        if path in (TEXT, CHAT, RESPONSES):
            assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_suffix_request_equals_prompt_with_infill_tokens(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """The test model has no infill tokens: three of its other special tokens stand for them."""
    with serve_llm(llm) as server:
        refused = server.post(TEXT, prompt="x", suffix="y").json()["error"]
        assert (refused["param"], "no tokens" in refused["message"]) == ("suffix", True)
        names = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
        monkeypatch.setattr("headstart.text.infill.MARKERS", [names])
        asked = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        raw = server.post(TEXT, prompt="{}a ={}\nprint(a){}".format(*names), **asked).json()
        given = server.post(TEXT, prompt="a =", suffix="\nprint(a)", echo=True, **asked).json()
        assert given["choices"][0]["text"] == "a =" + raw["choices"][0]["text"]
        assert given["usage"]["prompt_tokens"] == raw["usage"]["prompt_tokens"]
        cut = server.post(TEXT, prompt="a =", suffix="\nprint(a)", truncate_prompt_tokens=5)
        assert (cut.status_code, cut.json()["error"]["param"]) == (400, "truncate_prompt_tokens")
        asked = {"model": MODEL, "stream": False, "options": {"num_predict": 8, "temperature": 0, "ignore_eos": True}}
        ollama = server.post(GENERATE, prompt="a =", suffix="\nprint(a)", **asked).json()
        assert ollama["response"] == raw["choices"][0]["text"]
        raw = server.post(TEXT, prompt="", suffix="print(a)").json()
        ollama = server.post(GENERATE, prompt="", suffix="print(a)", **asked).json()
        assert ollama["prompt_eval_count"] == raw["usage"]["prompt_tokens"]


def test_disconnect_cancels_a_streamed_request(server: Server) -> None:
    for path, body in LONG.items():
        with server.client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, path
            next(answer.iter_bytes())
        server.wait_idle()


def test_api_key_headers_and_request_timeout_in_each_api(llm: LLM) -> None:
    """Both headers of the API key are accepted. --request-timeout ends running streams with an error."""
    headers = ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"})
    with serve_llm(llm, api_key=("secret",), request_timeout=3, served_model_name=(MODEL,)) as server:
        for path, body in LONG.items():
            refused = server.post(path, **body)
            assert refused.status_code == 401
            assert "key" in error_in(path, refused.json())
        with ThreadPoolExecutor(6) as threads:
            asked = [threads.submit(server.client.post, path, json=body, headers=each)
                     for path, body in LONG.items() for each in headers]  # fmt: skip
            for answer in [each.result() for each in asked]:
                assert answer.status_code == 200
                last = [line for line in answer.text.splitlines() if line][-1].removeprefix("data: ")
                assert "took longer" in json.dumps(json.loads(last))
