"""One request over a connection of its own, and what may be wrong with its answer."""

from __future__ import annotations

import http.client
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

BUSY = frozenset({429, 503, 504})
"""What a loaded server may say to a request that is fine."""


LINES = "application/x-ndjson"
PARTS = ({"message", "type", "param", "code"}, {"message", "type"})
"""Of OpenAI's errors, and of Anthropic's; Ollama's is a text."""
ENDS = ("message_stop", "error", "response.completed", "response.incomplete")


@dataclass(frozen=True)
class Answer:
    """Status 0: the connection broke; `body` then says how."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith(("text/event-stream", LINES))

    def events(self) -> list[Any]:
        """The documents of a stream; its end as the text [DONE]."""
        start = "" if self.headers["content-type"].startswith(LINES) else "data: "
        lines = [line.removeprefix(start) for line in self.body.decode().split("\n") if line and line.startswith(start)]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


def encoded(body: Any) -> bytes:
    """A body as it goes over the wire: JSON, where it is not bytes already."""
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def send(url: str, path: str, body: Any, timeout: float = 120.0, method: str = "POST") -> Answer:
    """POST a body; breaks of the connection are answers, too."""
    started = time.monotonic()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent: the answer may be there
            connection.request(method, path, encoded(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        status, headers = reply.status, {name.lower(): value for name, value in reply.getheaders()}
        data = reply.read()
    except (OSError, http.client.HTTPException) as error:
        return Answer(0, f"{type(error).__name__}: {error}".encode(), seconds=time.monotonic() - started)
    finally:
        connection.close()
    return Answer(status, data, headers, time.monotonic() - started)


def problem(answer: Answer) -> str:
    """What is wrong with an answer, whatever the request was; empty: nothing."""
    if answer.status == 0:
        return f"no answer: {answer.body.decode()}"
    if answer.status >= 500 and answer.status not in BUSY:
        return f"{answer.status}: {answer.body[:300]!r}"
    if answer.status >= 400:
        return _wrong_error(answer)
    try:
        if answer.is_stream:
            return _wrong_stream(answer.events())
        json.loads(answer.body)
    except ValueError as error:
        return f"the answer is not JSON: {error}"
    return ""


def _wrong_error(answer: Answer) -> str:
    try:
        error = json.loads(answer.body)["error"]
    except (ValueError, KeyError, TypeError):
        return f"an error in nobody's shape: {answer.status} {answer.body[:200]!r}"
    if not error or (isinstance(error, dict) and (set(error) not in PARTS or not error["message"])):
        return f"an error without its parts: {answer.body[:200]!r}"
    if len(answer.body) > 4000:
        return f"an error of {len(answer.body)} bytes"
    if answer.status in (429, 503) and "retry-after" not in answer.headers:
        return f"{answer.status} without Retry-After"
    return ""


def _wrong_stream(events: list[Any]) -> str:
    last = events[-1] if events else {}
    if last != "[DONE]" and last.get("type") not in ENDS and not last.get("done") and "error" not in last:
        return "a stream without an end"
    for event in events:
        error = event.get("error") if isinstance(event, dict) else None
        if isinstance(error, dict) and (error["type"] == "api_error" or 500 <= error.get("code", 0) not in BUSY):
            return f"an error in a stream: {event}"
    return ""
