"""A client for OpenAI-compatible servers that keeps the time at which each piece of text came: HTTP/1.1, one connection
per request. What arrives is only stamped and kept, and read when the answer is complete, since client and server often
share a machine's cores."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urljoin, urlsplit

import httptools

from headstart.errors import UsageError
from headstart.tools import engine_metrics

SILENCE_S = 600.0
"""A server that says nothing for so long is taken for dead."""
EVENT = b"data:"
REDIRECTS = (301, 302, 307, 308)
MODELS = "/v1/models"
SHOWN = 200
"""Characters of a server's error that are shown."""


@dataclass(frozen=True)
class Server:
    """Where requests go. `prefix` stands before every path; `trusted`: its certificate is not looked at."""

    host: str
    port: int
    tls: bool = False
    prefix: str = ""
    api_key: str | None = field(default=None, repr=False)
    trusted: bool = False

    @classmethod
    def at(cls, url: str, api_key: str | None = None) -> Self:
        """Raises UsageError. A path that ends in /v1, as clients of OpenAI have it, is taken without that; without a
        scheme it is http."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is not the address of a server", "for example http://127.0.0.1:8000")
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
class Response:
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
        self.headers[name.lower()] = value

    def on_body(self, data: bytes) -> None:
        self.parts.append((self.heard, data))

    def on_message_complete(self) -> None:
        self.complete = True
        self._end()


async def get(server: Server, path: str) -> Response:
    """The answer's `body`; nothing of it is read as a completion. Raises OSError when nobody listens."""
    answer, collector, _ = await _exchange(server, "GET", path, b"", None)
    if answer.status in REDIRECTS and (to := collector.headers.get(b"location")):
        moved = urlsplit(urljoin(server.prefix + path, to.decode())).path.removeprefix(server.prefix)
        answer, collector, _ = await _exchange(server, "GET", moved, b"", None)
    answer.body = b"".join(data for _, data in collector.parts).decode(errors="replace")
    return answer


async def post(
    server: Server, path: str, body: dict[str, Any] | bytes, *, leave_after: float | None = None
) -> Response:
    """POST and read to the end, or hang up after `leave_after` seconds. Raises OSError when nobody listens,
    TimeoutError when the server has gone silent."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer, collector, sent = await _exchange(server, "POST", path, content, leave_after)
    if answer.status > 0:
        _read(collector, answer, sent)
    return answer


async def _exchange(
    server: Server, method: str, path: str, content: bytes, leave_after: float | None
) -> tuple[Response, _Collector, float]:
    fields = [f"{method} {server.prefix}{path} HTTP/1.1", f"Host: {server.host}:{server.port}", "Connection: close"]
    fields += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    fields += [f"Authorization: Bearer {server.api_key}"] if server.api_key else []
    request = "\r\n".join(fields).encode() + b"\r\n\r\n" + content
    sent, loop = time.perf_counter(), asyncio.get_running_loop()
    transport, collector = await loop.create_connection(
        lambda: _Collector(request), server.host, server.port, ssl=_tls(server)
    )
    answer = Response()
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


def _tls(server: Server) -> ssl.SSLContext | bool | None:
    if not (server.tls and server.trusted):
        return server.tls or None
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


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


def _read(collector: _Collector, answer: Response, sent: float) -> None:
    """Take the answer apart."""
    content_type = collector.headers.get(b"content-type", b"").lower()
    if any(data.startswith(EVENT) for _, data in collector.parts[:1]) or b"text/event-stream" in content_type:
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


def _take(document: dict[str, Any], answer: Response, now: float) -> None:
    answer.usage = document.get("usage") or answer.usage
    if "error" in document:
        answer.status, answer.body = 500, json.dumps(document)
    for choice in document.get("choices") or ():
        part = choice.get("delta") or choice.get("message") or choice
        text = part.get("reasoning_content") or part.get("reasoning") or ""  # first, as it comes in streams
        text += (part.get("content") if "text" not in part else part["text"]) or ""
        for call in part.get("tool_calls") or ():
            text += call.get("function", {}).get("arguments") or ""
        if choice.get("finish_reason"):
            answer.finish_reason = choice["finish_reason"]
        if text:
            answer.first = answer.first or now
            answer.pieces.append((now, len(text)))
            answer.text += text


def models(server: Server) -> list[dict[str, Any]]:
    """Entries of /v1/models, of which each has an id. Raises UsageError saying what is wrong with the server."""
    try:
        answer = asyncio.run(get(server, MODELS))
    except (OSError, UnicodeError) as error:  # the latter: no such name can be looked up
        hint = "is the server running, and the address right? headstart serve --port 8000 starts one"
        raise UsageError(f"cannot reach {server}: {reason(error)}", hint) from None
    if answer.status in (401, 403):
        raise UsageError(f"{server} wants another API key", "give it with --api-key")
    try:
        listed: list[dict[str, Any]] = json.loads(answer.body)["data"]
        if listed and all(isinstance(each["id"], str) for each in listed):
            return listed
    except (ValueError, TypeError, KeyError):
        pass
    raise UsageError(
        f"{server} is no OpenAI-compatible server: {MODELS} answers {answer.status} {message(answer.body)!r}",
        "give the address that a client of OpenAI would get",
    )


async def counts(server: Server) -> engine_metrics.Counts | None:
    """What the server counts; None where it shows no metrics that are known."""
    for path in engine_metrics.PATHS:
        try:
            answer = await get(server, path)
        except (OSError, ValueError):
            return None
        if answer.status == 200 and (read := engine_metrics.read(answer.body)):
            return read
    return None


def reason(error: Exception) -> str:
    """Without the addresses that asyncio repeats."""
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        return "connection refused"
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def message(body: str) -> str:
    """The error in OpenAI's shape, or the beginning of whatever it is."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, TypeError, KeyError):
        text = body
    return " ".join(text.split())[:SHOWN]
