"""speculation.events: events of passes agree with text and usage and leave the text unchanged."""

import json
from typing import Any

import pytest
from process import Server

pytestmark = pytest.mark.slow  # a server process
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ASKED = {"stream": True, "stream_options": {"include_usage": True}, "seed": 5, "max_tokens": 24, "n": 2}
MESSAGES = [{"role": "user", "content": "Repeat: 🎉 Hello from Oslo! 🎉 Then explain why."}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, "logprobs": True, "speculation": {"depth": 3}}),
    "stop": (TEXT, {"prompt": "Once upon a time", "stop": [" the"], "temperature": 0, "speculation": {"depth": 3}}),
    "schema": (CHAT, {"messages": MESSAGES, "guided_json": SCHEMA, "speculation": {"depth": 2}}),
    "plain": (TEXT, {"prompt": "Once upon a time", "speculation": {"mode": "off"}}),
}


def choices_of(server: Server, path: str, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Choices of all chunks, and the usage."""
    lines = server.post(path, **body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line not in ("", "data: [DONE]")]
    assert not [chunk for chunk in chunks if "error" in chunk], chunks[-1]
    return [choice for chunk in chunks for choice in chunk["choices"]], chunks[-1]["usage"]


def text_of(choices: list[dict[str, Any]], index: int) -> str:
    own = [each for each in choices if each["index"] == index]
    return "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in own)


@pytest.mark.parametrize("name", BODIES)
def test_events_of_passes_agree_with_text_and_usage(server: Server, name: str) -> None:
    path, given = BODIES[name]
    body = {**ASKED, **given, "cache_salt": name}
    with_events, usage = choices_of(server, path, {**body, "speculation": {**given["speculation"], "events": True}})
    without_events, _ = choices_of(server, path, {**body, "cache_salt": f"{name} again"})
    assert not any("speculation" in each for each in without_events)
    passes = [one for each in with_events for one in each.get("speculation", ())]
    for index in range(2):
        text = text_of(with_events, index)
        assert text == text_of(without_events, index)
        tokens = [
            token for each in with_events if each["index"] == index
            for one in each.get("speculation", ()) for token in one["tokens"]
        ]  # fmt: skip
        assert "".join(token["text"] for token in tokens).startswith(text)
        assert text
    assert sum(len(one["tokens"]) for one in passes) == usage["completion_tokens"]
    counted, drafted = usage["speculation"], [one for one in passes if one["drafter"] != "forced"]
    assert sum(one["drafted"] for one in drafted) == counted["drafted"]
    assert sum(one["accepted"] for one in drafted) == counted["accepted"]
    sources = {one["drafter"] for one in drafted if one["accepted"]}
    assert sources == {source for source, count in counted["sources"].items() if count}
    for one in passes:
        assert one["drafted"] == one["accepted"] + len(one["rejected"])
        accepted = [token["accepted"] for token in one["tokens"]]
        assert accepted == sorted(accepted, reverse=True)
        assert sum(accepted) == min(one["accepted"], len(one["tokens"]))
        assert all(token["score"] is None or 0 <= token["score"] <= 1 for token in (*one["tokens"], *one["rejected"]))
    assert (counted["drafted"] > 0) == (name != "plain")
    assert any(one["rejected"] for one in passes) == (name != "plain")


def test_chunks_have_as_many_logprobs_as_tokens(server: Server) -> None:
    body = {**ASKED, "messages": MESSAGES, "logprobs": True, "speculation": {"events": True}}
    for choice in choices_of(server, CHAT, body)[0]:
        tokens = [token["text"] for one in choice.get("speculation", ()) for token in one["tokens"]]
        assert len(tokens) == len((choice["logprobs"] or {"content": ()})["content"])


def test_events_need_a_stream(server: Server) -> None:
    answer = server.post(TEXT, prompt="x", speculation={"events": True})
    assert answer.status_code == 400
    assert "speculation.events" in answer.json()["error"]["message"]
