"""The one way from a body to its answer, whichever API it came by: prepared in a worker thread, begun in the engine,
told whole or as it grows. APIs differ in how they tell it (`Telling`)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from headstart.errors import GenerationError, HeadstartError, TimeLimitError, UsageError
from headstart.server import answers, fields
from headstart.server.documents import Asked
from headstart.server.entries import KeepAlive, Served
from headstart.server.errors import BodyError, error_of
from headstart.server.guards import OWNER
from headstart.server.intake import Incoming, Intake, lane_of
from headstart.server.prepare import Job, chat_job, completion_job, is_constrained, num_choices
from headstart.server.replicas.state import Member
from headstart.server.replies import Reply
from headstart.server.schema import ChatRequest, Common, CompletionRequest
from headstart.server.shelf import Shelf

Result = TypeVar("Result")
log = logging.getLogger("headstart.server")
CLIENT_GONE = 499
"""As nginx calls it; nobody reads it."""


def errors_in(shape: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """What an endpoint may answer beside its result, for the OpenAPI document."""
    return {
        code: {"description": text, "model": shape}
        for code, text in {
            400: "The request is wrong.",
            401: "The API key is missing or wrong.",
            404: "There is no such model.",
            408: "The body did not come in time.",
            413: "The body is too large.",
            415: "The body is not JSON.",
            429: "The API key has no requests or tokens left for now.",
            500: "The engine failed.",
            503: "Too much waits, or the server is shutting down.",
            504: "The request took longer than --request-timeout.",
        }.items()
    }


ERRORS = errors_in(answers.ErrorBody)


@dataclass(frozen=True)
class State:
    """What the endpoints of one server share. `started`: Unix time; `member`: of several replicas behind a router."""

    shelf: Shelf
    started: int
    request_timeout: float | None
    member: Member | None = None
    intake: Intake = field(default_factory=Intake)

    @asynccontextmanager
    async def deadline(self, incoming: Incoming) -> AsyncIterator[None]:
        """What is done here for a request ends --request-timeout after its arrival. Raises TimeLimitError."""
        seconds = self.request_timeout
        try:
            async with asyncio.timeout_at(None if seconds is None else incoming.arrived + seconds):
                yield
        except TimeoutError:
            raise TimeLimitError(f"the request took longer than {seconds:g} s", "ask for fewer tokens") from None


class Telling(Protocol):
    """How one API tells a reply. `end` closes a stream, whether it ended well or not."""

    media_type: str
    end: str

    async def whole(self) -> bytes:
        """The one JSON document."""

    def events(self) -> AsyncIterator[str]:
        """The same in pieces, each as it stands on the wire."""

    def failed(self, error: HeadstartError) -> str:
        """An error after the first piece."""


class OpenAITelling:
    """Completions and chat completions: server-sent events without names."""

    media_type, end = "text/event-stream", "data: [DONE]\n\n"

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    async def whole(self) -> bytes:
        return await self._reply.whole()

    async def events(self) -> AsyncIterator[str]:
        async for chunk in self._reply.chunks():
            yield f"data: {chunk}\n\n"

    def failed(self, error: HeadstartError) -> str:
        return f"data: {json.dumps(error_of(error)[1])}\n\n"


Tell = Callable[[Reply], Telling]
Prepare = Callable[[Served], Job]


def completing(body: CompletionRequest) -> Prepare:
    return lambda served: completion_job(served.llm, body)


def chatting(body: ChatRequest) -> Prepare:
    return lambda served: chat_job(served.llm, served.formats, body)


async def answer_other(
    request: Request, translate: Callable[[], Common], tell: Tell, keep_alive: KeepAlive | None = None
) -> Response:
    """The answer to a body of another API, as the chat or completion it comes to; `translate` runs in a thread."""
    state, incoming = state_of(request), incoming_of(request)
    async with state.deadline(incoming):
        body = await state.intake.lanes.run(lane_of(incoming), translate)
    if body.n not in (None, 1) or (body.speculation is not None and body.speculation.events):
        what = "speculation.events" if body.n in (None, 1) else "n"
        raise BodyError(f"{what} is not supported here", what, "use /v1/chat/completions")
    if isinstance(body, CompletionRequest):
        return await answer(request, body, completing(body), tell, keep_alive)
    assert isinstance(body, ChatRequest)
    return await answer(request, body, chatting(body), tell, keep_alive)


async def answer(
    request: Request, body: Common, prepare: Prepare, tell: Tell = OpenAITelling, keep_alive: KeepAlive | None = None
) -> Response:
    state, incoming = state_of(request), incoming_of(request)
    headers = fields.header(fields.check(body.model_extra))
    state.shelf.find(body.model)
    if body.stream_options is not None and not body.stream:
        raise UsageError("stream_options is given, but stream is not true", "leave it out")
    if body.speculation is not None and body.speculation.events and not body.stream:
        raise UsageError("speculation.events is true, but stream is not", "they come in the chunks of a stream")
    account = state.shelf.accounts.named(request.scope.get(OWNER, ""))
    served = await served_by(request, body.model, keep_alive)
    if served is None:
        return Response(status_code=CLIENT_GONE)
    bridge = served.bridge
    asked, name, streamed = Asked.of(body), body.model or served.names[0], bool(body.stream)
    lane = "grammar" if is_constrained(body) else lane_of(incoming)

    async def begun() -> Reply:
        job = await state.intake.lanes.run(lane, prepare, served)
        job = job.owned(account, body.priority)
        reply = Reply(bridge, state.intake.lanes, job, asked, name)
        await reply.begin()
        return reply

    async def done(reply: Reply) -> bytes:
        async with state.deadline(incoming):
            return await tell(reply).whole()

    with bridge.preparing(num_choices(body), account.name):
        async with state.deadline(incoming):
            reply = await unless_gone(request, begun())
    incoming.release()
    headers |= account.headers()
    if reply is None:
        return Response(status_code=CLIENT_GONE)
    if streamed:
        return _Stream(state, incoming, reply, tell(reply), headers)
    whole = await unless_gone(request, done(reply))
    if whole is None:
        return Response(status_code=CLIENT_GONE)
    return Response(whole, media_type="application/json", headers=headers)


class _Stream(Response):
    """Pieces as they come. Whatever becomes of the response, nothing of the reply is left in the engine."""

    def __init__(
        self, state: State, incoming: Incoming, reply: Reply, telling: Telling, headers: dict[str, str]
    ) -> None:
        self._state, self._incoming, self._reply, self._telling = state, incoming, reply, telling
        super().__init__(media_type=telling.media_type, headers={"Cache-Control": "no-cache", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(Request(scope, receive), self._send_all(send))
        finally:
            self._reply.close()

    async def _send_all(self, send: Send) -> None:
        """An error after the first byte can only be told in the stream; a reader that is late is waited for."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def piece(text: str, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        error: HeadstartError | None = None
        try:
            async with self._state.deadline(self._incoming):
                async for event in self._telling.events():
                    await piece(event)
        except HeadstartError as found:
            error = found
        except Exception:
            log.exception("a stream failed")
            error = GenerationError("the server failed on this request")
        self._reply.close()
        if error is not None:
            await piece(self._telling.failed(error))
        await piece(self._telling.end, more=False)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Run `work`, but stop it as soon as the client hangs up; then None."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_hung_up(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        gone.cancel()
        task.cancel()


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def prepared(
    request: Request, name: str | None, work: Callable[[Served], bytes], headers: dict[str, str]
) -> Response:
    """The JSON answer of work with a model in a thread, within the request's time."""
    state, incoming = state_of(request), incoming_of(request)
    if (served := await served_by(request, name)) is None:
        return Response(status_code=CLIENT_GONE)
    async with state.deadline(incoming):
        data = await state.intake.lanes.run(lane_of(incoming), work, served)
    return Response(data, media_type="application/json", headers=headers)


async def served_by(request: Request, name: str | None, keep_alive: KeepAlive | None = None) -> Served | None:
    """The model of that name (None: the first), loaded where it is not in memory; None where the client has gone.
    Raises ModelError for a name that this server does not have, and what loading raises."""
    state = state_of(request)
    if (found := state.shelf.at_hand(name, keep_alive)) is not None:
        return found
    async with state.deadline(incoming_of(request)):
        return await unless_gone(request, state.shelf.get(name, keep_alive))


def state_of(request: Request) -> State:
    state: State = request.app.state.headstart
    return state


def incoming_of(request: Request) -> Incoming:
    incoming: Incoming = request.state.incoming
    return incoming
