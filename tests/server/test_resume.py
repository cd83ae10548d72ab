"""Responses resumed by another engine at any record: repeated pieces are equal byte for byte, and the whole response
equals that of one engine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from image_files import data_url, png
from inside import LlmServer, serve_llm
from process import CITY, QUESTION, WEATHER

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.server import journal, pipeline
from headstart.server.replicas import frames
from headstart.server.replicas.group import ReplicaId
from headstart.server.schema import image_part

pytestmark = pytest.mark.slow
ORIGIN = f"{'0' * 32}-1700000000"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAMPLED = {"temperature": 0.9, "seed": 7, "max_tokens": 24}
TOOLS = [{"type": "function", "function": WEATHER}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3, "min_tokens": 12}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat without a seed": (CHAT, {"messages": QUESTION, "max_tokens": 24, "temperature": 1.0}),
    "choices and logprobs": (CHAT, {"messages": QUESTION, **SAMPLED, "n": 3, "logprobs": True, "top_logprobs": 2}),
    "penalties": (CHAT, {"messages": QUESTION, **SAMPLED, **PENALTIES}),
    "schema": (CHAT, {"messages": QUESTION, **SAMPLED, "response_format": SCHEMA, "max_tokens": 60}),
    "tools": (CHAT, {"messages": QUESTION, **SAMPLED, "tools": TOOLS, "tool_choice": "required", "max_tokens": 60}),
    "stop string": (CHAT, {"messages": QUESTION, **SAMPLED, "n": 2, "stop": ["e", "zq"], "min_tokens": 4}),
    "prompts, echo": (TEXT, {
        "prompt": ["One, two,", "Red, green,"], **SAMPLED, "n": 2, "echo": True, "logprobs": 1, "prompt_logprobs": 1,
        "return_token_ids": True,
    }),
    "passes": (CHAT, {"messages": QUESTION, **SAMPLED, "speculation": {"depth": 3, "events": True}}),
    "responses": ("/v1/responses", {"input": "Name a colour.", "temperature": 1.0, "max_output_tokens": 24}),
    "responses, tools": ("/v1/responses", {
        "input": "Weather?", "tools": [{"type": "function", **WEATHER}], "tool_choice": "required", "seed": 3,
        "max_output_tokens": 60,
    }),
    "anthropic": ("/v1/messages", {"model": "m", "messages": QUESTION, "max_tokens": 24, "temperature": 1.0}),
    "anthropic, tools": ("/v1/messages", {
        "model": "m", "messages": QUESTION, "max_tokens": 60, "tools": [{"name": "get_weather", "input_schema": CITY}],
        "tool_choice": {"type": "any"},
    }),
    "ollama": ("/api/chat", {"model": "m", "messages": QUESTION, "options": {"num_predict": 24, "temperature": 1.0}}),
}  # fmt: skip
VARYING = {
    "created_at", "total_duration", "prompt_eval_duration", "eval_duration", "speculation", "completion_tokens_details",
    "sequence_number",
}  # fmt: skip
"""Members that depend on the time or on the division of a text into passes."""


@pytest.fixture(scope="module")
def engines(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LlmServer, LlmServer]]:
    """Two engines of one model, with and without drafting."""
    other = LLM(llm.model, EngineConfig(threads=1, max_num_seqs=3, kv_blocks=256, max_model_len=2048, depth=0))
    replica = ReplicaId(tmp_path_factory.mktemp("replicas"), 0, "token")
    settings = {"replica": replica, "served_model_name": ["m"]}
    with serve_llm(llm, **settings) as one, serve_llm(other, **settings) as two:
        yield one, two
    other.close()


def ask(server: LlmServer, path: str, body: dict[str, Any], record: bytes = b"") -> list[tuple[int, bytes]]:
    """Frames of a response."""
    headers = {frames.TOKEN: "token", frames.ORIGIN: ORIGIN, frames.RECORD_SIZE: str(len(record))}
    headers |= {frames.RESUMED: str(int(bool(record))), "content-type": "application/json"}
    data = server.client.post(path, content=record + json.dumps(body).encode(), headers=headers).content
    found = []
    while data:
        kind, size = frames.HEADER.unpack_from(data)
        data = data[frames.HEADER.size :]
        found.append((kind, data[:size]))
        data = data[size:]
    return found


def pieces(found: list[tuple[int, bytes]]) -> list[bytes]:
    return [data for kind, data in found if kind == frames.BODY]


def without_varying(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_varying(each) for name, each in value.items() if name not in VARYING}
    return [without_varying(each) for each in value] if isinstance(value, list) else value


def merged(body: list[bytes]) -> Any:
    """Content of a response independent of its events: lists and texts of one place are joined."""
    found: dict[str, Any] = {}
    for line in b"".join(body).decode().splitlines():
        text = line.removeprefix("data: ")
        if text and not text.startswith(("event:", "[DONE]")):
            collect(without_varying(json.loads(text)), found, "")
    return found


def collect(value: Any, into: dict[str, Any], place: str) -> None:
    if isinstance(value, dict):
        place += f"{value.get('type', '')}{value.get('index', '')}{value.get('output_index', '')}"
        for name, each in value.items():
            collect(each, into, f"{place}.{name}")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for each in value:
            collect(each, into, place)
    elif value not in (None, "", []):
        known = into.setdefault(place, value if isinstance(value, str | list) else [])
        if known is not value and place.endswith((".content", ".text", ".delta", ".arguments", ".partial_json", "ids")):
            into[place] = known + value
        elif known is not value:
            into[place] = value


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_response_resumes_at_any_record(
    engines: tuple[LlmServer, LlmServer], name: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_UNWRITTEN", 0)  # also within a document
    (first, second), (path, body) = engines, CASES[name]
    if name == "passes" and not stream:
        pytest.skip("chunks only")
    body = {**body, "stream": stream}
    whole = ask(first, path, body)
    assert [json.loads(data)[0] for kind, data in whole if kind == frames.HEAD] == [200]
    expected = merged(pieces(whole))
    cuts = [place for place in range(1, len(whole)) if whole[place - 1][0] == frames.RECORD]
    assert len(cuts) > 1
    for cut in [cuts[0], cuts[len(cuts) // 2], cuts[-1], cuts[-1] + 1]:
        known = pieces(whole[:cut])
        record = b"".join(data for kind, data in whole[:cut] if kind == frames.RECORD)
        again = ask(second, path, body, record)
        assert again[-1][0] == frames.END
        got = pieces(again)
        if not path.startswith("/api/") and cut <= cuts[-1]:  # lines with times; usage of the last piece
            assert got[: len(known)] == known
        assert merged([*known, *got[len(known) :]]) == expected


def test_record_beyond_the_context_is_refused(engines: tuple[LlmServer, LlmServer], llm: LLM, tmp_path: Path) -> None:
    body = {"prompt": "One, two,", "max_tokens": 40, "ignore_eos": True, "seed": 1}
    found = ask(engines[0], TEXT, body)
    record = b"".join(data for kind, data in found if kind == frames.RECORD)
    small = LLM(llm.model, EngineConfig(threads=1, kv_blocks=64, max_model_len=20))
    with serve_llm(small, replica=ReplicaId(tmp_path, 0, "token")) as server:
        (_, head), (_, answer), _ = ask(server, TEXT, {**body, "max_tokens": 41}, record)
    assert json.loads(head)[0] == 400
    assert "the context holds 20" in json.loads(answer)["error"]["message"]
    small.close()


def test_frames_require_the_token(engines: tuple[LlmServer, LlmServer]) -> None:
    body = {"prompt": "One,", "max_tokens": 1}
    answer = engines[0].client.post(TEXT, json=body, headers={frames.TOKEN: "guess", frames.RECORD_SIZE: "0"})
    assert (answer.status_code, answer.json()["object"]) == (200, "text_completion")


def test_resumed_tokens_are_counted_once(engines: tuple[LlmServer, LlmServer]) -> None:
    body = {"prompt": "One, two,", "max_tokens": 20, "ignore_eos": True, "seed": 1}
    found = ask(engines[0], TEXT, body)
    lines = b"".join(data for kind, data in found if kind == frames.RECORD).splitlines(keepends=True)
    record = b"".join(lines[: len(lines) // 2])
    said = sum(len(json.loads(line)[2]) for line in lines[: len(lines) // 2])
    before = engines[1].served.metrics.generated_tokens
    ask(engines[1], TEXT, body, record)
    assert engines[1].served.metrics.generated_tokens - before == 20 - said


def test_resumed_request_uses_the_first_download_of_an_image(
    vision_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The image comes from the record. The URL returns another image at each download."""
    files = iter([png(1), png(2), png(3)])

    async def download(urls: list[str], _: Any) -> dict[str, bytes]:
        return {url: next(files) for url in urls}

    monkeypatch.setattr(pipeline, "download", download)
    monkeypatch.setattr(journal, "MAX_UNWRITTEN", 0)
    urls = data_url(png(0)), "https://example.org/a.png"
    content = [*map(image_part, urls), {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 24, "stream": True, "seed": 1}
    with serve_llm(vision_llm, replica=ReplicaId(tmp_path, 0, "token"), allow_image_urls=True) as server:
        whole = ask(server, CHAT, body)
        cut = [place for place in range(1, len(whole)) if whole[place - 1][0] == frames.RECORD][2]
        record = b"".join(data for kind, data in whole[:cut] if kind == frames.RECORD)
        known, again = pieces(whole[:cut]), pieces(ask(server, CHAT, body, record))
        assert again[: len(known)] == known
        assert merged(again) == merged(pieces(whole)) != merged(pieces(ask(server, CHAT, body)))
