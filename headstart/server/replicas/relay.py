"""The relay between router and engines: a response whose engine is lost continues at another one, byte for byte.

The router knows one address of the relay for each replica. Requests go to the engine of that replica, or to another one
while it is down. Engines answer in frames (frames.py). The relay keeps the record of each response and sends it to the
next engine, which makes the same response again. The relay drops the pieces that the client already has. It closes the
connections to engines that are silent or are being renewed.
"""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import uvicorn
from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from headstart.errors import BusyError, GenerationError, HeadstartError, status_of
from headstart.server.body_reader import BodyReader, cancel_on_disconnect
from headstart.server.errors import ClientGone, error_body, error_piece, retry_headers
from headstart.server.journal import new_origin
from headstart.server.protocol import HttpProtocol
from headstart.server.replicas import frames
from headstart.server.replicas.metrics import OWN_HEADER

HOST = "127.0.0.1"  # of the relay and the engines

WAIT_S = 300.0  # maximum time of a request without an engine
RETRY_S = 0.1
MAX_LOSSES, MAX_LOSING_S = 5, 120.0
"""A request fails if more than MAX_LOSSES engines ended while they worked on it, over more than MAX_LOSING_S seconds
without new text: the request may be the cause."""
HOP_HEADERS = frozenset({
    b"connection", b"keep-alive", b"te", b"upgrade", b"transfer-encoding", b"content-length", b"expect",
})  # fmt: skip
Why = Literal["ended", "silent", "renewed"]


class LostError(Exception):
    """The connection to an engine has ended before the response."""


class RefusedError(Exception):
    """An engine refuses to continue a response."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ReplicaEngine(Protocol):
    """A replica's process."""

    number: int
    port: int
    fingerprint: str  # ServedModel.fingerprint; empty: not known yet
    is_silent: bool

    @property
    def is_ready(self) -> bool: ...


@dataclass(eq=False)
class Upstream:
    """One request at an engine."""

    engine: ReplicaEngine
    writer: asyncio.StreamWriter
    why: Why = "ended"  # reason if the connection ends before the response

    def abort(self, why: Why) -> None:
        """Close the connection."""
        self.why = why
        self.writer.transport.abort()


@dataclass(eq=False)
class Exchange:
    """One request of a client, and the part of its response that was sent."""

    scope: Scope
    body: bytes
    send: Send
    origin: str = field(default_factory=new_origin)
    fingerprint: str = ""  # of the engine that began the response; empty: it has not begun
    record: bytearray = field(default_factory=bytearray)
    status: int = 0
    headers: list[tuple[str, str]] = field(default_factory=list)  # sent before the first piece
    num_pieces: int = 0  # pieces of the body that were sent
    num_losses: int = 0  # engines that ended since the record grew last
    grew_at: float = field(default_factory=time.monotonic)  # time at which the record grew last
    waits_since: float = field(default_factory=time.monotonic)  # time of arrival, or of the last loss of an engine

    def request(self, token: str) -> bytes:
        """The request to an engine, as HTTP/1.0: responses to it are not chunked."""
        scope, kept = self.scope, [pair for pair in self.scope["headers"] if pair[0] not in HOP_HEADERS]
        own = {
            frames.TOKEN: token, frames.ORIGIN: self.origin, frames.RECORD_SIZE: str(len(self.record)),
            frames.RESUMED: str(int(bool(self.fingerprint))), "content-length": str(len(self.record) + len(self.body)),
        }  # fmt: skip
        kept = [pair for pair in kept if not pair[0].startswith(frames.PREFIX.encode())]
        kept += [(name.encode(), value.encode()) for name, value in own.items()]
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        lines = [b"%s %s HTTP/1.0" % (method.encode(), target), *(b"%s: %s" % pair for pair in kept), b"", b""]
        return b"\r\n".join(lines) + self.record + self.body

    async def add(self, piece: bytes) -> None:
        """Send a piece of the body."""
        if not self.num_pieces:
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers]
            await self.send({"type": "http.response.start", "status": self.status, "headers": headers})
        self.num_pieces += 1
        await self.send({"type": "http.response.body", "body": piece, "more_body": True})

    async def finish(self) -> None:
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def fail(self, error: HeadstartError) -> None:
        """Send an error: as the response, or as the last event of a stream that has begun."""
        status, path = status_of(error).http, self.scope["path"]
        if not self.num_pieces:
            headers = retry_headers(error) if isinstance(error, BusyError) else None
            response = JSONResponse(error_body(str(error), status, path=path), status, headers)
            await response(self.scope, _no_more, self.send)
            return
        kind = next((value for name, value in self.headers if name == "content-type"), "")
        event = error_event(path, kind, str(error), status)
        if not event:  # half a document: the connection breaks off
            raise error
        await self.add(event)
        await self.finish()


async def _no_more() -> Any:
    return {"type": "http.disconnect"}


def error_event(path: str, media_type: str, message: str, status: int) -> bytes:
    """The last piece of a stream of the API at `path`; empty where the response is no stream."""
    if not media_type.startswith(("application/x-ndjson", "text/event-stream")):
        return b""
    document = error_body(message, status, path=path)
    if path.startswith("/v1/responses"):
        document = {"type": "error", "code": "server_error", "message": document["error"]["message"], "param": None}
    is_openai = not path.startswith(("/v1/responses", "/v1/messages", "/api/"))
    return (error_piece(document, path) + ("data: [DONE]\n\n" if is_openai else "")).encode()


class Relay:
    """The ASGI application. `engines`: the current engine of each replica."""

    def __init__(self, token: str, ports: list[int], engines: Callable[[], Collection[ReplicaEngine]]) -> None:
        """ports: the relay's port for each replica, by the replica's number."""
        self.token, self.ports, self._engines = token, ports, engines
        self.resumed = Counter[Why]()
        self._reader = BodyReader()
        self._upstreams: set[Upstream] = set()
        self._changed = asyncio.Event()
        self._able_at = -math.inf  # last time at which an engine could serve

    @property
    def urls(self) -> list[str]:
        return [f"http://{HOST}:{port}" for port in self.ports]

    def engines_changed(self) -> None:
        """Wake the requests that wait for an engine."""
        self._changed.set()
        self._changed = asyncio.Event()

    def move_requests(self, engine: ReplicaEngine, why: Why) -> None:
        """Move the requests of an engine to others that can continue them, if there are any."""
        if any(_can_serve(other, engine.fingerprint) for other in self._engines() if other is not engine):
            for upstream in [each for each in self._upstreams if each.engine is engine]:
                upstream.abort(why)

    def metrics(self) -> str:
        """The relay's counters as Prometheus text."""
        name = "headstart:resumed_requests_total"
        lines = [f"# HELP {name} Requests that went on at another engine.", f"# TYPE {name} counter"]
        return "\n".join([*lines, *(f'{name}{{why="{why}"}} {self.resumed[why]}' for why in get_args(Why)), ""])

    def _keeps_requests(self) -> bool:
        """Whether requests are kept waiting: no engine can serve now, but one could within the last WAIT_S seconds."""
        if any(_can_serve(each, "") for each in self._engines()):
            self._able_at = time.monotonic()
            return False
        return time.monotonic() - self._able_at < WAIT_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        if request.headers.get(OWN_HEADER) == self.token:  # a replica asks for metrics
            await Response(self.metrics())(scope, receive, send)
            return
        if scope["path"] == "/health" and self._keeps_requests():  # the router would refuse requests otherwise
            await JSONResponse({"status": "waiting"})(scope, receive, send)
            return
        try:
            with self._reader.incoming() as incoming:
                body = await self._reader.body(request, incoming)
        except ClientGone:
            return
        except (HTTPException, BusyError) as error:
            status = error.status_code if isinstance(error, HTTPException) else 503
            text = error.detail if isinstance(error, HTTPException) else str(error)
            await JSONResponse(error_body(text, status, path=scope["path"]), status)(scope, receive, send)
            return
        with suppress(ClientGone):
            await cancel_on_disconnect(receive, self._answer(Exchange(scope, body, send)))

    async def _answer(self, exchange: Exchange) -> None:
        """Ask engines until the whole response is sent."""
        engine: ReplicaEngine | None = None
        while True:
            try:
                engine = await self._choose(exchange, engine)
                if await self._read(exchange, engine):
                    return
            except RefusedError as refusal:
                if refusal.status != 503:
                    await exchange.fail(GenerationError(f"the text broke off: {refusal}"))
                    return
            except HeadstartError as error:
                await exchange.fail(error)
                return
            await asyncio.sleep(RETRY_S)

    async def _choose(self, exchange: Exchange, last: ReplicaEngine | None) -> ReplicaEngine:
        """The engine of the request's replica, else the least busy; the last one only if there is no other. Raises
        BusyError if no engine can serve in time, GenerationError if no engine can continue the text."""
        number, deadline = self.ports.index(exchange.scope["server"][1]), exchange.waits_since + WAIT_S
        while time.monotonic() < deadline:
            changed, engines = self._changed, self._engines()
            able = [each for each in engines if _can_serve(each, exchange.fingerprint)]
            if able:
                load = Counter(upstream.engine for upstream in self._upstreams)
                return min(able, key=lambda each: (each is last, each.number != number, load[each]))
            wanted = ("", exchange.fingerprint)
            if exchange.fingerprint and not any(each.fingerprint in wanted for each in engines):
                why = "its engine has ended, and the others serve another version or model"
                raise GenerationError(f"the text broke off: {why}")
            if exchange.scope["method"] != "POST":
                raise BusyError("no engine answers", "try again later")
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), deadline - time.monotonic())
        raise BusyError(f"no engine has answered within {WAIT_S:g} s", "see the server's log")

    async def _read(self, exchange: Exchange, engine: ReplicaEngine) -> bool:
        """Send the response of an engine to the client. False: the engine is lost. Raises RefusedError, and
        GenerationError if the request seems to crash engines."""
        upstream: Upstream | None = None
        try:
            reader, writer = await asyncio.open_connection(HOST, engine.port)
            upstream = Upstream(engine, writer)
            self._upstreams.add(upstream)
            writer.write(exchange.request(self.token))
            await self._pass_on(exchange, engine.fingerprint, reader)
            return True
        except (OSError, asyncio.IncompleteReadError, LostError):
            why: Why = upstream.why if upstream else "ended"
        finally:
            if upstream is not None:
                self._upstreams.discard(upstream)
                upstream.writer.transport.abort()
        if upstream is None:
            return False
        self.resumed[why], exchange.waits_since = self.resumed[why] + 1, time.monotonic()
        exchange.num_losses += why == "ended"
        if exchange.num_losses > MAX_LOSSES and time.monotonic() - exchange.grew_at > MAX_LOSING_S:
            raise GenerationError(f"{exchange.num_losses} engines have ended while they worked on this request")
        return False

    async def _pass_on(self, exchange: Exchange, fingerprint: str, reader: asyncio.StreamReader) -> None:
        if not (await reader.readuntil(b"\r\n\r\n")).startswith((b"HTTP/1.1 200", b"HTTP/1.0 200")):
            raise LostError
        known, status, is_refused, refusal = exchange.num_pieces, 0, False, b""
        while True:
            kind, size = frames.HEADER.unpack(await reader.readexactly(frames.HEADER.size))
            data = await reader.readexactly(size)
            if kind == frames.HEAD:
                status, headers = json.loads(data)
                is_refused = bool(exchange.fingerprint) and status >= 400
                if not (known or is_refused):
                    exchange.status, exchange.headers = status, headers
            elif kind == frames.RECORD:
                exchange.record += data
                exchange.num_losses, exchange.grew_at, exchange.fingerprint = 0, time.monotonic(), fingerprint
            elif kind == frames.BODY and is_refused:
                refusal += data
            elif kind == frames.BODY and known:
                known -= 1
            elif kind == frames.BODY:
                exchange.fingerprint = fingerprint
                await exchange.add(data)
            elif is_refused:
                raise RefusedError(status, _message(refusal))
            else:
                await exchange.finish()
                return


def _can_serve(engine: ReplicaEngine, fingerprint: str) -> bool:
    return engine.is_ready and not engine.is_silent and fingerprint in ("", engine.fingerprint)


def _message(document: bytes) -> str:
    """The message of an error in any API's shape."""
    with suppress(ValueError, TypeError, KeyError):
        error = json.loads(document)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    return "another engine refuses to continue it"


class RelayServer(uvicorn.Server):
    """Serves a relay on sockets, beside a supervisor that handles the signals."""

    def __init__(self, relay: Relay) -> None:
        options: dict[str, Any] = {"ws": "none", "lifespan": "off", "log_config": None, "access_log": False}
        super().__init__(uvicorn.Config(relay, http=HttpProtocol, **options))

    @contextmanager
    def capture_signals(self) -> Any:
        yield
