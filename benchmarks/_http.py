"""A small HTTP/1.1 client for load: one connection per request; what arrives is only stamped and kept, and read when
the answer is complete, since client and server share the machine's cores."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Answer:
    """What came back. Times in seconds since the request was sent; `pieces`: (time, characters) of text."""

    status: int = 0
    text: str = ""
    first: float = 0.0
    seconds: float = 0.0
    pieces: list[tuple[float, int]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    body: str = ""


class _Collector(asyncio.Protocol):
    """Keeps (time, bytes) until the server closes the connection."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.parts: list[tuple[float, bytes]] = []
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def post(
    address: tuple[str, int], path: str, body: dict[str, Any] | bytes, *, leave_after: float | None = None
) -> Answer:
    """POST and read to the end, or hang up after `leave_after` seconds (status -1)."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = f"Host: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    request = f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + content
    sent = time.perf_counter()
    loop = asyncio.get_running_loop()
    transport, collector = await loop.create_connection(lambda: _Collector(request), *address)
    answer = Answer()
    try:
        async with asyncio.timeout(leave_after):
            await collector.closed
        answer.seconds = time.perf_counter() - sent
        _read(collector.parts, answer, sent)
    except TimeoutError:
        answer.status, answer.seconds = -1, time.perf_counter() - sent
    finally:
        transport.abort()
    return answer


def _read(parts: list[tuple[float, bytes]], answer: Answer, sent: float) -> None:
    """Take the answer apart. Chunk sizes of the transfer coding stand between events and are skipped."""
    whole = b"".join(data for _, data in parts)
    head, _, body = whole.partition(b"\r\n\r\n")
    answer.status = int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/") else 0
    if b"text/event-stream" not in head.lower():
        answer.body = _unchunked(body).decode() if b"chunked" in head.lower() else body.decode()
        answer.first = parts[-1][0] - sent if parts else 0.0
        if answer.status == 200:
            _take(json.loads(answer.body), answer, answer.first)
        return
    arrived, ends = [when for when, _ in parts], []
    for _, data in parts:
        ends.append((ends[-1] if ends else 0) + len(data))
    at, part = whole.find(b"data: "), 0
    while at >= 0:
        end = whole.index(b"\n", at)
        while ends[part] < end:
            part += 1
        data = whole[at + 6 : end]
        if not data.startswith(b"[DONE]"):
            _take(json.loads(data), answer, arrived[part] - sent)
        at = whole.find(b"data: ", end)


def _unchunked(body: bytes) -> bytes:
    found = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        count = int(size, 16)
        found, body = found + body[:count], body[count + 2 :]
        if not count:
            break
    return found


def _take(document: dict[str, Any], answer: Answer, now: float) -> None:
    answer.usage = document.get("usage") or answer.usage
    if "error" in document:
        answer.status, answer.body = 500, json.dumps(document)
    for choice in document.get("choices", ()):
        part = choice.get("delta") or choice.get("message") or choice
        text = (part.get("content") if "text" not in part else part["text"]) or ""
        for call in part.get("tool_calls") or ():
            text += call["function"].get("arguments") or ""
        if choice.get("finish_reason"):
            answer.finish_reason = choice["finish_reason"]
        if text:
            answer.first = answer.first or now
            answer.pieces.append((now, len(text)))
            answer.text += text
