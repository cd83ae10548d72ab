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


@dataclass(frozen=True)
class Answer:
    """Status 0: the connection broke; `body` then says how."""

    status: int
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    def events(self) -> list[Any]:
        """The documents of a stream; its end as the text [DONE]."""
        lines = [line for line in self.body.decode().split("\n") if line.startswith("data: ")]
        return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


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
        return f"an error that is not in OpenAI's shape: {answer.status} {answer.body[:200]!r}"
    if set(error) != {"message", "type", "param", "code"} or not error["message"]:
        return f"an error without its parts: {answer.body[:200]!r}"
    if len(answer.body) > 4000:
        return f"an error of {len(answer.body)} bytes"
    if answer.status in (429, 503) and "retry-after" not in answer.headers:
        return f"{answer.status} without Retry-After"
    return ""


def _wrong_stream(events: list[Any]) -> str:
    if not events or events[-1] != "[DONE]":
        return "a stream without [DONE]"
    for event in events[:-1]:
        if "error" in event and event["error"]["code"] >= 500 and event["error"]["code"] not in BUSY:
            return f"an error in a stream: {event}"
    return ""
