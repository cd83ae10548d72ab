"""HTTP/1.1 client for OpenAI-compatible servers that records the arrival time of each piece of text.

Each request uses its own connection. Responses are parsed after they are complete, since client and server often share
the cores of a machine.
"""

import asyncio
import json
import ssl
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urljoin, urlsplit

import httptools

from headstart.errors import UsageError
from headstart.tools import engine_metrics

SILENCE_S = 600.0  # a server that sends nothing for this time counts as dead
EVENT = b"data:"
REDIRECTS = (301, 302, 307, 308)
MODELS, COMPLETIONS, CHAT = "/v1/models", "/v1/completions", "/v1/chat/completions"
MAX_ERROR_CHARACTERS = 200


@dataclass(frozen=True)
class Server:
    host: str
    port: int
    tls: bool = False
    prefix: str = ""  # path of the base URL, before every path
    api_key: str | None = field(default=None, repr=False)
    skip_tls_check: bool = False  # accept any TLS certificate

    @classmethod
    def at(cls, url: str, api_key: str | None = None) -> Self:
        """Parses a URL; the default scheme is http, and /v1 at the end of a path is dropped. Raises UsageError."""
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
    """A response. Times are in seconds since the request was sent."""

    status: int = 0  # HTTP status
    text: str = ""  # generated text
    seconds: float = 0.0  # time of the end
    pieces: list[tuple[float, int]] = field(default_factory=list)  # (arrival time, characters) of each piece of text
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    body: str = ""
    broken: bool = False  # the connection ended before the response was complete

    @property
    def first(self) -> float:
        """Time of the first text; 0 without text."""
        return self.pieces[0][0] if self.pieces else 0.0


class _Collector(asyncio.Protocol):
    """Stores the parts of a response body with their arrival times until the response or the connection ends."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.parts: list[tuple[float, bytes]] = []
        self.headers: dict[bytes, bytes] = {}
        self.complete = False
        self.received_at = time.perf_counter()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.received_at = time.perf_counter()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:  # not HTTP, or a protocol upgrade
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        # without a declared length, the end of the connection is the end of the response
        undeclared = not {b"content-length", b"transfer-encoding"} & self.headers.keys()
        self.complete |= bool(self.status) and undeclared and error is None
        self._end()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    @property
    def status(self) -> int:
        return int(self.parser.get_status_code()) if self.headers else 0

    @property
    def text(self) -> str:
        """The body so far."""
        return b"".join(data for _, data in self.parts).decode(errors="replace")

    # httptools calls these.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.lower()] = value

    def on_body(self, data: bytes) -> None:
        self.parts.append((self.received_at, data))

    def on_message_complete(self) -> None:
        self.complete = True
        self._end()


async def get(server: Server, path: str) -> Response:
    """Returns the response with its unparsed `body`; follows one redirect. Raises OSError if no server listens."""
    answer, collector, _ = await _exchange(server, "GET", path)
    if answer.status in REDIRECTS and (to := collector.headers.get(b"location")):
        moved = urlsplit(urljoin(server.prefix + path, to.decode())).path.removeprefix(server.prefix)
        answer, collector, _ = await _exchange(server, "GET", moved)
    answer.body = collector.text
    return answer


async def post(server: Server, path: str, body: dict[str, Any] | bytes) -> Response:
    """Posts a request and parses the whole completion. Raises OSError if the server cannot be reached or is silent for
    SILENCE_S, ValueError for an invalid response."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer, collector, sent = await _exchange(server, "POST", path, content)
    if answer.status:
        _parse(collector, answer, sent)
    return answer


async def _exchange(server: Server, method: str, path: str, content: bytes = b"") -> tuple[Response, _Collector, float]:
    """Returns (response without its content, its collector, time at which the request was sent)."""
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
        await _wait(collector)
        answer.status, answer.broken = collector.status, not collector.complete
    finally:
        answer.seconds = time.perf_counter() - sent
        transport.abort()
    return answer, collector, sent


def _tls(server: Server) -> ssl.SSLContext | bool | None:
    if not (server.tls and server.skip_tls_check):
        return server.tls or None
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def _wait(collector: _Collector) -> None:
    """Waits for the end of the response. Raises TimeoutError after SILENCE_S without data."""
    while not collector.ended.done():
        left = collector.received_at + SILENCE_S - time.perf_counter()
        if left <= 0:
            raise TimeoutError(f"the server sent nothing for {SILENCE_S:g} s")
        await asyncio.wait([collector.ended], timeout=left)


def _parse(collector: _Collector, answer: Response, sent: float) -> None:
    content_type = collector.headers.get(b"content-type", b"").lower()
    if any(data.startswith(EVENT) for _, data in collector.parts[:1]) or b"text/event-stream" in content_type:
        for when, event in _events(collector.parts):
            if event != b"[DONE]":
                _add_choices(json.loads(event), answer, when - sent)
        return
    answer.body = collector.text
    if answer.status == 200 and not answer.broken:
        _add_choices(json.loads(answer.body), answer, collector.parts[-1][0] - sent)


def _events(parts: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    rest = b""
    for when, data in parts:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(EVENT):
                yield when, line[len(EVENT) :].strip()


def _add_choices(document: dict[str, Any], answer: Response, now: float) -> None:
    answer.usage = document.get("usage") or answer.usage
    if "error" in document:
        answer.status, answer.body = 500, json.dumps(document)
    for choice in document.get("choices") or ():
        part = choice.get("delta") or choice.get("message") or choice
        text = part.get("reasoning_content") or part.get("reasoning") or ""  # streams send reasoning first
        text += (part.get("content") if "text" not in part else part["text"]) or ""
        for call in part.get("tool_calls") or ():
            text += call.get("function", {}).get("arguments") or ""
        if choice.get("finish_reason"):
            answer.finish_reason = choice["finish_reason"]
        if text:
            answer.pieces.append((now, len(text)))
            answer.text += text


def ask(server: Server, request: Coroutine[Any, Any, Response]) -> Response:
    """Returns the response to a request. Raises UsageError for a server that cannot be reached or refuses the key."""
    try:
        answer = asyncio.run(request)
    except (OSError, ValueError) as error:  # ValueError: an invalid host name or response
        hint = "is the server running, and the address right? headstart serve --port 8000 starts one"
        raise UsageError(f"cannot reach {server}: {error_reason(error)}", hint) from None
    if answer.status in (401, 403):
        raise UsageError(f"{server} refuses the API key", "give a valid one with --api-key, or HEADSTART_API_KEY")
    return answer


def list_models(server: Server) -> list[dict[str, Any]]:
    """Returns the entries of /v1/models, each with an id. Raises UsageError for a server that cannot be reached, wants
    another API key, or does not list models."""
    answer = ask(server, get(server, MODELS))
    try:
        listed: list[dict[str, Any]] = json.loads(answer.body)["data"]
        if listed and all(isinstance(each["id"], str) for each in listed):
            return listed
    except (ValueError, TypeError, KeyError):
        pass
    found = f"{MODELS} answers {answer.status} {error_message(answer.body)!r}"
    hint = "give the base URL of an OpenAI-compatible API"
    raise UsageError(f"{server} is not an OpenAI-compatible server: {found}", hint)


def find_model(server: Server, name: str | None) -> dict[str, Any]:
    """Returns the entry of a model, or of the first model for None. Raises UsageError as `list_models`."""
    listed = list_models(server)
    found = next((each for each in listed if name in (None, each["id"])), None)
    if found is None:
        raise UsageError(f"{server} has no model {name!r}", f"it has {', '.join(each['id'] for each in listed[:10])}")
    return found


def get_object(server: Server, path: str) -> dict[str, Any]:
    """Returns the JSON object at a path; empty if the server has none."""
    try:
        answer = asyncio.run(get(server, path))
        found = json.loads(answer.body) if answer.status == 200 else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


async def read_counters(server: Server) -> engine_metrics.EngineCounters | None:
    """Returns the server's drafting counters; None if it has no metrics of a known engine."""
    for path in engine_metrics.PATHS:
        try:
            answer = await get(server, path)
        except (OSError, ValueError):
            return None
        if answer.status == 200 and (read := engine_metrics.read(answer.body)):
            return read
    return None


def error_reason(error: Exception) -> str:
    """Returns the reason of a connection error, without the addresses that asyncio repeats."""
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        return "connection refused"
    return str(getattr(error, "strerror", None) or error) or type(error).__name__


def error_message(body: str) -> str:
    """Returns the message of an error in OpenAI's format, else the beginning of the body."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, TypeError, KeyError):
        text = body
    return " ".join(text.split())[:MAX_ERROR_CHARACTERS]
