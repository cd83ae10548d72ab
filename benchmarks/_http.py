"""A small HTTP/1.1 client for load: one connection per request, little work per chunk, since client and server share
the machine's cores."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
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


async def _chunks(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncIterator[bytes]:
    if headers.get("transfer-encoding", "") == "chunked":
        while size := int(await reader.readline(), 16):
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while data := await reader.read(65536):
            yield data


async def post(
    address: tuple[str, int], path: str, body: dict[str, Any] | bytes, *, leave_after: float | None = None
) -> Answer:
    """POST and read to the end, or hang up after `leave_after` seconds (status -1)."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(*address)
    answer, sent = Answer(), time.perf_counter()
    try:
        async with asyncio.timeout(leave_after):
            writer.write(head.encode() + content)
            answer.status = int((await reader.readline()).split()[1])
            headers = {}
            while (line := (await reader.readline()).strip()) != b"":
                name, _, value = line.decode().partition(":")
                headers[name.lower()] = value.strip().lower()
            await _read(reader, headers, answer, sent)
    except TimeoutError:
        answer.status = -1
    finally:
        answer.seconds = time.perf_counter() - sent
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return answer


async def _read(reader: asyncio.StreamReader, headers: dict[str, str], answer: Answer, sent: float) -> None:
    if "event-stream" not in headers.get("content-type", ""):
        answer.body = b"".join([chunk async for chunk in _chunks(reader, headers)]).decode()
        answer.first = time.perf_counter() - sent
        if answer.status == 200:
            _take(json.loads(answer.body), answer, answer.first)
        return
    rest = b""
    async for chunk in _chunks(reader, headers):
        now = time.perf_counter() - sent
        *events, rest = (rest + chunk).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data: ")
            if data != b"[DONE]":
                _take(json.loads(data), answer, now)


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
