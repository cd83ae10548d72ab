"""The official `ollama` client and requests of Open WebUI against the running server."""

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import httpx
import pytest
from process import MODEL, QUESTION, Server
from support import PATIENCE

pytestmark = pytest.mark.slow  # a server process
TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
OPTIONS = {"seed": 1, "num_predict": 24, "temperature": 0.8}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with pytest.importorskip("ollama").Client(server.url) as found:
        yield found


def test_list_ps_show_and_pull(client: Any) -> None:
    (listed,) = client.list().models
    (running,) = client.ps().models
    shown = client.show(MODEL)
    assert listed.model == running.name == f"{MODEL}:latest"
    assert (shown.details.family, shown.details.parameter_size) == ("llama", "135M")
    assert shown.modelinfo["llama.context_length"] == running.context_length
    assert "tools" in shown.capabilities
    assert "<|im_start|>" in shown.template
    assert shown.parameters == "temperature 0.2\ntop_p 0.9"
    assert client.pull(MODEL).status == "success"
    assert [each.status for each in client.pull(MODEL, stream=True)] == ["pulling manifest", "success"]


def test_chat_without_options_uses_the_recommended_sampling(client: Any, server: Server) -> None:
    """The OpenAI API has the same default temperature and top_p."""
    options = {"num_predict": 24, "seed": 1}
    text = client.chat(MODEL, QUESTION, options={**options, "temperature": 0.2, "top_p": 0.9}).message.content
    assert client.chat(MODEL, QUESTION, options=options).message.content == text
    said = server.post("/v1/chat/completions", messages=QUESTION, max_tokens=24, seed=1).json()
    assert said["choices"][0]["message"]["content"] == text


def test_streamed_and_whole_answers_are_equal(client: Any, server: Server) -> None:
    whole = client.chat(MODEL, QUESTION, options=OPTIONS)
    pieces = list(client.chat(MODEL, QUESTION, options=OPTIONS, stream=True))
    text = whole.message.content
    assert "".join(piece.message.content for piece in pieces) == text != ""
    assert (pieces[-1].done, pieces[-1].done_reason, pieces[-1].eval_count) == (True, "length", 24)
    assert 0 < whole.prompt_eval_duration + whole.eval_duration <= whole.total_duration < 60e9
    assert client.generate(MODEL, QUESTION[0]["content"], options=OPTIONS).response == text
    said = server.post("/v1/chat/completions", messages=QUESTION, max_tokens=24, seed=1, temperature=0.8).json()
    assert said["choices"][0]["message"]["content"] == text  # the chat completions API has the same text


def test_raw_prompts_json_format_and_tool_calls(client: Any, server: Server) -> None:
    raw = client.generate(MODEL, "One, two, three,", raw=True, options={"num_predict": 6, "temperature": 0})
    assert "four" in raw.response
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    text = client.chat(MODEL, QUESTION, format={**schema, "additionalProperties": False}, options={"temperature": 0})
    assert json.loads(text.message.content)["n"] in (1, 2)
    body = {
        "model": MODEL, "messages": QUESTION, "tools": [TIME], "tool_choice": "required",
        "options": {"num_predict": 80},
    }  # fmt: skip
    lines = server.post("/api/chat", **body, parallel_tool_calls=False).text.splitlines()
    (call,) = (call for line in lines for call in json.loads(line)["message"].get("tool_calls", ()))
    assert call["function"]["name"] == "get_time"
    assert isinstance(call["function"]["arguments"], dict)
    turns = [*QUESTION, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "12:30"}]
    assert client.chat(MODEL, turns, tools=[TIME], options=OPTIONS).done


def test_open_webui_session(server: Server) -> None:
    """Open WebUI's requests in its order: version, models, loaded models, streamed chat, title, OpenAI API."""
    json_type = {"Content-Type": "application/json"}
    with httpx.Client(base_url=server.url, headers=json_type, timeout=PATIENCE) as web:
        assert web.get("/api/version").json()["version"]
        names = [each["model"] for each in web.get("/api/tags").json()["models"]]
        loaded = {each["name"]: each["expires_at"] for each in web.get("/api/ps").json()["models"]}
        assert all(datetime.fromisoformat(loaded[name]).timestamp() > 0 for name in names)
        body: dict[str, Any] = {"model": names[0], "messages": QUESTION, "options": {"num_predict": 8}}
        with web.stream("POST", "/api/chat", content=json.dumps({**body, "stream": True})) as answer:
            assert answer.headers["content-type"].startswith("application/x-ndjson")
            lines = [json.loads(line) for line in answer.iter_lines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        title = web.post("/api/chat", content=json.dumps({**body, "stream": False, "keep_alive": "5m"})).json()
        assert title["done"]
        found = web.get("/v1/models").json()["data"][0]["id"]
        asked = {"model": found, "messages": QUESTION, "stream": True, "max_tokens": 8}
        asked["stream_options"] = {"include_usage": True}
        text = web.post("/v1/chat/completions", content=json.dumps(asked)).text
        assert text.endswith("data: [DONE]\n\n")
        asked["model"] = names[0]  # with the tag
        assert web.post("/v1/chat/completions", content=json.dumps(asked)).status_code == 200
