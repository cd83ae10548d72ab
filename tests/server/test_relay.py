"""The relay in front of fake engines: resuming, waiting, giving up, errors and metrics."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from headstart.server.replicas import frames, relay
from headstart.server.replicas.frames import BODY, END, HEAD, RECORD, frame
from headstart.server.replicas.metrics import OWN_HEADER
from headstart.server.replicas.relay import Relay, error_event

Send = Callable[[bytes], Awaitable[None]]
STREAM = json.dumps([200, [["content-type", "text/event-stream"]]]).encode()
WHOLE = json.dumps([200, [["content-type", "application/json"]]]).encode()


@pytest.fixture(autouse=True)
def no_retry_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "RETRY_S", 0.0)


@dataclass(eq=False)
class FakeEngine:
    """A fake engine: `respond` gets each request and a function that sends bytes."""

    number: int
    respond: Callable[["Asked", Send], Awaitable[None]]
    fingerprint: str = "same"
    is_silent: bool = False
    is_ready: bool = True
    port: int = 0
    requests: list["Asked"] = field(default_factory=list)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        body = await reader.readexactly(int(headers["content-length"]))
        size = int(headers[frames.RECORD_SIZE])
        self.requests.append(Asked(head[0], headers, body[:size], body[size:]))

        async def send(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        await send(b"HTTP/1.1 200 OK\r\n\r\n")
        try:
            await self.respond(self.requests[-1], send)
        except ConnectionError:
            pass
        finally:
            writer.close()


@dataclass
class Asked:
    """A request received by an engine."""

    line: str
    headers: dict[str, str]
    record: bytes
    body: bytes


@asynccontextmanager
async def start_relay(*engines: FakeEngine) -> AsyncIterator[Relay]:
    servers = [await asyncio.start_server(each.connected, "127.0.0.1", 0) for each in engines]
    for each, server in zip(engines, servers, strict=True):
        each.port = server.sockets[0].getsockname()[1]
    yield Relay("token", [80, 81], lambda: engines)
    for server in servers:
        server.close()


@dataclass
class Client:
    """A client's request; `received` has the messages sent to it."""

    received: list[dict[str, Any]] = field(default_factory=list)
    came: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, app: Relay, method: str = "POST", path: str = "/v1/completions", port: int = 80) -> None:
        messages = [{"type": "http.request", "body": b"{}", "more_body": False}]
        headers = [(b"host", b"here"), (frames.TOKEN.encode(), b"forged"), (b"connection", b"keep-alive")]
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "headers": headers, "server": ("127.0.0.1", port),
        }  # fmt: skip

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.received.append(message)
            self.came.set()

        await app(scope, receive, send)

    @property
    def status(self) -> int:
        found: int = self.received[0]["status"]
        return found

    @property
    def body(self) -> bytes:
        assert [each["type"] for each in self.received].count("http.response.start") == 1
        assert not self.received[-1].get("more_body")
        return b"".join(each["body"] for each in self.received[1:])


async def dies_early(_: Asked, send: Send) -> None:
    await send(frame(HEAD, STREAM) + frame(RECORD, b"1\n") + frame(BODY, b"a") + frame(RECORD, b"2\n") + b"\1\0")


async def completes(_: Asked, send: Send) -> None:
    await send(frame(HEAD, STREAM) + frame(BODY, b"a") + frame(BODY, b"b") + frame(BODY, b"c") + frame(END))


async def dies(_: Asked, send: Send) -> None:
    """Ends before any output."""


def test_next_engine_resumes_from_the_record() -> None:
    async def main() -> None:
        first, second = FakeEngine(0, dies_early), FakeEngine(1, completes)
        async with start_relay(first, second) as app:
            client = Client()
            await client.ask(app)
            assert (client.status, client.body) == (200, b"abc")
            (before,), (after,) = first.requests, second.requests
            assert (before.record, before.headers[frames.RESUMED]) == (b"", "0")
            assert (after.record, after.body, after.headers[frames.RESUMED]) == (b"1\n2\n", b"{}", "1")
            assert before.headers[frames.TOKEN] == after.headers[frames.TOKEN] == "token"
            assert before.headers[frames.ORIGIN] == after.headers[frames.ORIGIN]
            assert before.headers["host"] == "here" and "connection" not in before.headers
            assert 'resumed_requests_total{why="ended"} 1' in app.metrics()

    asyncio.run(main())


def test_abandoned_engine_cannot_write_into_the_stream() -> None:
    """Output of an abandoned engine that wakes up later is discarded."""
    woken, ended = asyncio.Event(), asyncio.Event()

    async def sleeps(_: Asked, send: Send) -> None:
        await send(frame(HEAD, STREAM) + frame(RECORD, b"1\n") + frame(BODY, b"a"))
        await woken.wait()
        try:
            for _ in range(1000):
                await send(frame(BODY, b"zombie") + frame(END))
        finally:
            ended.set()

    async def main() -> None:
        first, second = FakeEngine(0, sleeps), FakeEngine(1, completes)
        async with start_relay(first, second) as app:
            client = Client()
            asking = asyncio.create_task(client.ask(app))
            while len(client.received) < 2:
                client.came.clear()
                await client.came.wait()
            app.move_requests(first, "silent")
            await asking
            woken.set()
            await ended.wait()
            assert client.body == b"abc"
            assert app.resumed["silent"] == 1

    asyncio.run(main())


def test_engine_is_kept_without_a_replacement() -> None:
    woken = asyncio.Event()

    async def slow(_: Asked, send: Send) -> None:
        await send(frame(HEAD, STREAM) + frame(BODY, b"a"))
        await woken.wait()
        await send(frame(BODY, b"b") + frame(END))

    async def main() -> None:
        only, other = FakeEngine(0, slow), FakeEngine(1, completes, fingerprint="another")
        async with start_relay(only, other) as app:
            client = Client()
            asking = asyncio.create_task(client.ask(app))
            await client.came.wait()
            app.move_requests(only, "renewed")
            woken.set()
            await asking
            assert client.body == b"ab" and not app.resumed

    asyncio.run(main())


def test_requests_wait_for_an_engine() -> None:
    async def main() -> None:
        down = FakeEngine(0, completes, is_ready=False, fingerprint="")
        async with start_relay(down) as app:
            client, impatient = Client(), Client()
            asking = asyncio.create_task(client.ask(app))
            await impatient.ask(app, "GET", "/health")
            assert impatient.status == 503
            down.is_ready, down.fingerprint = True, "same"
            app.engines_changed()
            await asking
            assert client.body == b"abc"
            await Client().ask(app, "GET", "/health")
            down.is_ready, later = False, Client()
            await later.ask(app, "GET", "/health")
            assert later.status == 200  # healthy for the router: requests wait

    asyncio.run(main())


def test_waiting_for_an_engine_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "WAIT_S", 0.05)

    async def main() -> None:
        begins = FakeEngine(0, dies_early)
        down = FakeEngine(1, completes, is_ready=False)

        async def once(asked: Asked, send: Send) -> None:
            begins.is_ready = False
            await dies_early(asked, send)

        begins.respond = once
        async with start_relay(begins, down) as app:
            client = Client()
            await client.ask(app)
            assert client.body.startswith(b'adata: {"error": {"message": "no engine has answered within')
            assert client.body.endswith(b"data: [DONE]\n\n")

    asyncio.run(main())


def test_engine_of_another_version_does_not_resume() -> None:
    async def main() -> None:
        first, second = FakeEngine(0, dies_early), FakeEngine(1, completes, fingerprint="another")

        async def once(asked: Asked, send: Send) -> None:
            await dies_early(asked, send)
            first.is_ready, first.fingerprint = False, "newer"

        first.respond = once
        async with start_relay(first, second) as app:
            client = Client()
            await client.ask(app)
            assert b"the others serve another version" in client.body
            assert not second.requests

    asyncio.run(main())


def test_full_engine_is_retried_and_its_refusal_is_passed_on() -> None:
    answers = [(503, "full"), (400, "the context holds 20")]

    async def refuses(_: Asked, send: Send) -> None:
        status, text = answers.pop(0)
        document = json.dumps({"error": {"message": text}}).encode()
        await send(frame(HEAD, json.dumps([status, []]).encode()) + frame(BODY, document) + frame(END))

    async def main() -> None:
        first, second = FakeEngine(0, dies_early), FakeEngine(1, refuses)

        async def once(asked: Asked, send: Send) -> None:
            first.is_ready = False
            await dies_early(asked, send)

        first.respond = once
        async with start_relay(first, second) as app:
            client = Client()
            await client.ask(app)
            assert len(second.requests) == 2
            assert b"the text broke off: the context holds 20" in client.body

    asyncio.run(main())


def test_errors_before_output_are_passed_on() -> None:
    async def refuses(_: Asked, send: Send) -> None:
        await send(frame(HEAD, json.dumps([429, [["retry-after", "3"]]]).encode()) + frame(BODY, b"{}") + frame(END))

    async def main() -> None:
        async with start_relay(FakeEngine(0, refuses)) as app:
            client = Client()
            await client.ask(app)
            assert (client.status, client.received[0]["headers"]) == (429, [(b"retry-after", b"3")])

    asyncio.run(main())


def test_request_that_crashes_engines_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_LOSING_S", 0.0)

    async def main() -> None:
        engines = FakeEngine(0, dies), FakeEngine(1, dies)
        async with start_relay(*engines) as app:
            client = Client()
            await client.ask(app)
            assert (client.status, len(engines[0].requests) + len(engines[1].requests)) == (500, relay.MAX_LOSSES + 1)
            assert b"engines have ended while they worked on this request" in client.body

    asyncio.run(main())


def test_disconnect_closes_the_connection_to_the_engine() -> None:
    async def main() -> None:
        begun, left = asyncio.Event(), asyncio.Event()

        async def endless(_: Asked, send: Send) -> None:
            await send(frame(HEAD, WHOLE))
            begun.set()
            try:
                while True:
                    await send(frame(RECORD, b"x" * 10**6))
            finally:
                left.set()

        async with start_relay(FakeEngine(0, endless)) as app:
            client = Client()
            asking = asyncio.create_task(client.ask(app))
            await begun.wait()
            client.gone.set()
            await asking
            await left.wait()
            assert client.received == []

    asyncio.run(main())


def test_relay_serves_metrics_to_replicas() -> None:
    async def main() -> None:
        async with start_relay() as app:
            sent: list[Any] = []

            async def send(message: Any) -> None:
                sent.append(message)

            headers = [(OWN_HEADER.encode(), b"token")]
            await app({"type": "http", "method": "GET", "path": "/metrics", "headers": headers}, None, send)  # type: ignore[arg-type]
            assert b"resumed_requests_total" in sent[1]["body"]

    asyncio.run(main())


@pytest.mark.parametrize(("path", "media_type", "event"), [
    ("/api/chat", "application/x-ndjson", b'{"error": "no"}\n'),
    ("/v1/messages", "text/event-stream; charset=utf-8", b"event: error\ndata: {"),
    ("/v1/responses", "text/event-stream", b'event: error\ndata: {"type": "error", "code": "server_error"'),
    ("/v1/completions", "text/event-stream", b'data: {"error": {"message": "no"'),
    ("/v1/completions", "application/json", b""),
])  # fmt: skip
def test_error_events_have_the_apis_format(path: str, media_type: str, event: bytes) -> None:
    found = error_event(path, media_type, "no", 500)
    assert found.startswith(event) and bool(found) == bool(event)
