"""An HTTP/1.1 client for load: one connection per request. What arrives is only stamped and kept, and read when the
answer is complete, since client and server often share a machine's cores."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import httptools

from headstart.errors import UsageError

SILENCE_S = 600.0
"""A server that says nothing for so long is taken for dead."""
EVENT = b"data:"


@dataclass(frozen=True)
class Server:
    """Where requests go. `prefix` stands before every path."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def at(cls, url: str, api_key: str | None = None) -> Self:
        """Raises UsageError. A path that ends in /v1, as clients of OpenAI have it, is taken without that."""
        hint = "for example http://127.0.0.1:8000"
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"--url is {url!r}: {error}", hint) from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--url is {url!r}, which is not the address of a server", hint)
        tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), tls, prefix, api_key)

    @property
    def is_local(self) -> bool:
        return self.host in ("localhost", "127.0.0.1", "::1")

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


@dataclass
class Answer:
    """What came back. Times in seconds since the request was sent; `pieces`: (time, characters) of text. Status -1:
    hung up. `broken`: the connection ended before the answer did."""

    status: int = 0
    text: str = ""
    first: float = 0.0
    seconds: float = 0.0
    pieces: list[tuple[float, int]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    body: str = ""
    broken: bool = False


class _Collector(asyncio.Protocol):
    """Keeps the parts of the body as they come, until the answer or the connection ends."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.parts: list[tuple[float, bytes]] = []
        self.headers: dict[bytes, bytes] = {}
        self.complete = False
        self.heard = time.perf_counter()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.heard = time.perf_counter()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:  # not HTTP, or a connection that is to be something else
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        # without a declared end, the end of the connection is the end of the answer
        undeclared = not {b"content-length", b"transfer-encoding"} & self.headers.keys()
        self.complete |= bool(self.status) and undeclared and error is None
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def status(self) -> int:
        return int(self.parser.get_status_code()) if self.headers else 0

    # httptools calls these.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value.lower()

    def on_body(self, data: bytes) -> None:
        self.parts.append((self.heard, data))

    def on_message_complete(self) -> None:
        self.complete = True
        self._end()


async def get(server: Server, path: str) -> Answer:
    """The answer's `body`; nothing of it is read as a completion. Raises OSError when nobody listens."""
    answer, collector, _ = await _exchange(server, "GET", path, b"", None)
    answer.body = b"".join(data for _, data in collector.parts).decode(errors="replace")
    return answer


async def post(server: Server, path: str, body: dict[str, Any] | bytes, *, leave_after: float | None = None) -> Answer:
    """POST and read to the end, or hang up after `leave_after` seconds. Raises OSError when nobody listens,
    TimeoutError when the server has gone silent."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer, collector, sent = await _exchange(server, "POST", path, content, leave_after)
    if answer.status > 0:
        _read(collector, answer, sent)
    return answer


async def _exchange(
    server: Server, method: str, path: str, content: bytes, leave_after: float | None
) -> tuple[Answer, _Collector, float]:
    fields = [f"{method} {server.prefix}{path} HTTP/1.1", f"Host: {server.host}:{server.port}", "Connection: close"]
    fields += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    fields += [f"Authorization: Bearer {server.api_key}"] if server.api_key else []
    request = "\r\n".join(fields).encode() + b"\r\n\r\n" + content
    sent, loop = time.perf_counter(), asyncio.get_running_loop()
    transport, collector = await loop.create_connection(
        lambda: _Collector(request), server.host, server.port, ssl=server.tls or None
    )
    answer = Answer()
    try:
        await _wait(collector, leave_after)
        answer.status, answer.broken = collector.status, not collector.complete
    except TimeoutError:
        if leave_after is None:
            raise TimeoutError(f"the server said nothing for {SILENCE_S:g} s") from None
        answer.status = -1
    finally:
        answer.seconds = time.perf_counter() - sent
        transport.abort()
    return answer, collector, sent


async def _wait(collector: _Collector, leave_after: float | None) -> None:
    """Until the answer ends. Raises TimeoutError after `leave_after` seconds, or when nothing comes any more."""
    if leave_after is not None:
        async with asyncio.timeout(leave_after):
            await collector.ended
        return
    while not collector.ended.done():
        left = collector.heard + SILENCE_S - time.perf_counter()
        if left <= 0:
            raise TimeoutError
        await asyncio.wait([collector.ended], timeout=left)


def _read(collector: _Collector, answer: Answer, sent: float) -> None:
    """Take the answer apart."""
    if b"text/event-stream" in collector.headers.get(b"content-type", b""):
        for when, event in _events(collector.parts):
            if event != b"[DONE]":
                _take(json.loads(event), answer, when - sent)
        return
    answer.body = b"".join(data for _, data in collector.parts).decode(errors="replace")
    answer.first = collector.parts[-1][0] - sent if collector.parts else 0.0
    if answer.status == 200 and not answer.broken:
        _take(json.loads(answer.body), answer, answer.first)


def _events(parts: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Data lines of a stream, each with the time its end arrived. A line that the end cuts off is left out."""
    rest = b""
    for when, data in parts:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(EVENT):
                yield when, line[len(EVENT) :].strip()


def _take(document: dict[str, Any], answer: Answer, now: float) -> None:
    answer.usage = document.get("usage") or answer.usage
    if "error" in document:
        answer.status, answer.body = 500, json.dumps(document)
    for choice in document.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or choice
        text = (part.get("content") if "text" not in part else part["text"]) or ""
        text += part.get("reasoning_content") or part.get("reasoning") or ""
        for call in part.get("tool_calls") or ():
            text += call.get("function", {}).get("arguments") or ""
        if choice.get("finish_reason"):
            answer.finish_reason = choice["finish_reason"]
        if text:
            answer.first = answer.first or now
            answer.pieces.append((now, len(text)))
            answer.text += text
