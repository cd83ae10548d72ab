"""Request pipeline of all APIs: body -> prepared request -> engine -> renderer. The response is JSON or a stream."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from headstart.errors import GenerationError, HeadstartError, ParameterError, TimeLimitError
from headstart.server.accounts import Account
from headstart.server.body_reader import BodyReader, IncomingBody, cancel_on_disconnect, pool_of
from headstart.server.errors import BodyError, ClientGone
from headstart.server.generation import Generation, ResponseOptions
from headstart.server.guards import OWNER
from headstart.server.image_urls import UrlPolicy, download, is_url
from headstart.server.journal import Journal
from headstart.server.model_manager import ModelManager, ServedModel
from headstart.server.options import KeepAlive
from headstart.server.prepare import check_images, is_constrained, num_choices, prepare
from headstart.server.renderer import MakeRenderer, ResponseRenderer, dump_json
from headstart.server.replicas.group import ReplicaId
from headstart.server.schema import Common, MessagesBody, ResponseModel, ignored_fields_header

log = logging.getLogger("headstart.server")


def error_responses(shape: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The error statuses of an endpoint for OpenAPI. `shape`: model of the error body."""
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
            503: "The queue is full, or the server is shutting down.",
            504: "The request took longer than --request-timeout.",
        }.items()
    }


class Error(ResponseModel):
    """OpenAI's error object. `code`: the HTTP status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(ResponseModel):
    """OpenAI's error response."""

    error: Error


ERRORS = error_responses(ErrorBody)


@dataclass(frozen=True)
class ServerState:
    """State shared by all endpoints of one server."""

    models: ModelManager
    started: int  # Unix time
    request_timeout: float | None  # seconds; None: no limit
    replica: ReplicaId | None = None  # set if this server is one of several replicas behind a router
    url_policy: UrlPolicy = field(default_factory=UrlPolicy)
    allow_lora_updates: bool = False  # may clients load and unload adapters?
    body_reader: BodyReader = field(default_factory=BodyReader)

    @asynccontextmanager
    async def deadline(self, incoming: IncomingBody) -> AsyncIterator[None]:
        """Cancel the enclosed work `request_timeout` after the request's arrival. Raises TimeLimitError."""
        seconds = self.request_timeout
        try:
            async with asyncio.timeout_at(None if seconds is None else incoming.arrived + seconds):
                yield
        except TimeoutError:
            raise TimeLimitError(f"the request took longer than {seconds:g} s", "ask for fewer tokens") from None


def state_of(request: Request) -> ServerState:
    """The server state of a request."""
    state: ServerState = request.app.state.headstart
    return state


def body_of(request: Request) -> IncomingBody:
    """The received body of a request."""
    incoming: IncomingBody = request.state.incoming
    return incoming


def account_of(request: Request) -> Account:
    """The account of the request's API key."""
    return state_of(request).models.accounts.named(request.scope.get(OWNER, ""))


async def respond_translated(
    request: Request, translate: Callable[[], Common], make_renderer: MakeRenderer, keep_alive: KeepAlive | None = None
) -> Response:
    """The response to a body of another API. `translate` runs in a worker thread and returns the body as a chat or
    completion request. Raises HeadstartError."""
    state, incoming = state_of(request), body_of(request)
    async with state.deadline(incoming):
        body = await state.body_reader.pools.run(pool_of(incoming), translate)
    if body.n not in (None, 1) or (body.speculation is not None and body.speculation.events):
        what = "speculation.events" if body.n in (None, 1) else "n"
        raise BodyError(f"{what} is not supported here", what, "use /v1/chat/completions")
    return await respond(request, body, make_renderer, keep_alive)


async def respond(
    request: Request, body: Common, make_renderer: MakeRenderer, keep_alive: KeepAlive | None = None
) -> Response:
    """The response to a chat or completion request of any API: JSON, or a stream. Raises HeadstartError."""
    state, incoming, account = state_of(request), body_of(request), account_of(request)
    headers = ignored_fields_header(body)
    state.models.find(body.model)
    if body.stream_options is not None and not body.stream:
        raise ParameterError("stream_options", "is given, but stream is not true", "leave it out")
    if body.speculation is not None and body.speculation.events and not body.stream:
        raise ParameterError("speculation.events", "is true, but stream is not", "they come in the chunks of a stream")
    served = await find_model(request, body.model, keep_alive)
    options, model, is_streamed = ResponseOptions.of(body), body.model or served.names[0], bool(body.stream)
    pools = state.body_reader.pools
    pool, journal = "grammar" if is_constrained(body) else pool_of(incoming), Journal.of(request.scope)

    async def begin() -> Generation:
        await _download_images(body, served, state, incoming, journal)
        prepared = await pools.run(pool, prepare, served.llm, served.formats, account, body, journal.seed)
        generation = Generation(served, pools, prepared, options, model, journal)
        await generation.begin()
        return generation

    async def render_whole(renderer: ResponseRenderer) -> bytes:
        async with state.deadline(incoming):
            return await renderer.whole()

    with nullcontext() if journal.is_resumed else served.admission.reserve(num_choices(body), account.name):
        async with state.deadline(incoming):
            generation = await cancel_on_disconnect(request.receive, begin())
    incoming.release()
    renderer, headers = make_renderer(generation), headers | account.headers()
    if is_streamed:
        return _StreamResponse(state, incoming, renderer, headers)
    whole = await cancel_on_disconnect(request.receive, render_whole(renderer))
    return Response(whole, media_type="application/json", headers=headers)


async def _download_images(
    body: MessagesBody, served: ServedModel, state: ServerState, incoming: IncomingBody, journal: Journal
) -> None:
    """Download the images of a body whose URLs are not data URLs, or take those that an earlier engine downloaded.
    Raises ImageError, UsageError without a vision tower, and BusyError."""
    urls = body.image_urls()
    if not urls:
        return
    check_images(served.llm, len(urls))
    wanted = [url for url in urls if is_url(url) and url not in journal.images]
    found = await download(wanted, state.url_policy)
    incoming.hold(sum(map(len, found.values())))
    journal.note_images(found)
    body._downloaded = {**journal.images, **found}


class _StreamResponse(Response):
    """Sends the pieces of a renderer, then closes its generation."""

    def __init__(
        self, state: ServerState, incoming: IncomingBody, renderer: ResponseRenderer, headers: dict[str, str]
    ) -> None:
        self._state, self._incoming, self._renderer = state, incoming, renderer
        super().__init__(media_type=renderer.media_type, headers={"Cache-Control": "no-cache", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await cancel_on_disconnect(receive, self._send_all(send))
        finally:
            self._renderer.generation.close()

    async def _send_all(self, send: Send) -> None:
        """Send status 200 and all pieces. Since the status is sent first, an error becomes an event of the stream."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def send_piece(text: str, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        error: HeadstartError | None = None
        try:
            async with self._state.deadline(self._incoming):
                async for event in self._renderer.stream():
                    await send_piece(event)
        except HeadstartError as found:
            error = found
        except Exception:
            log.exception("a stream failed")
            error = GenerationError("the server failed on this request")
        self._renderer.generation.close()
        if error is not None:
            await send_piece(self._renderer.error_event(error))
        await send_piece(self._renderer.end, more=False)


async def respond_from_thread(request: Request, body: Any, work: Callable[[ServedModel, Any], Any]) -> Response:
    """A response with the JSON document that `work` makes of the body and its model. `work` runs in a worker thread,
    within the request timeout."""
    state, incoming, headers = state_of(request), body_of(request), ignored_fields_header(body)
    served = await find_model(request, body.model)
    async with state.deadline(incoming):
        data = await state.body_reader.pools.run(pool_of(incoming), lambda: dump_json(work(served, body)))
    return Response(data, media_type="application/json", headers=headers)


async def find_model(request: Request, name: str | None, keep_alive: KeepAlive | None = None) -> ServedModel:
    """The model of that name (None: the first), loaded if it is not in memory. Raises ModelError for an unknown name,
    GenerationError or BusyError if the model cannot be loaded, and ClientGone."""
    state = state_of(request)
    if (found := state.models.get_loaded(name, keep_alive)) is not None:
        return found
    async with state.deadline(body_of(request)):
        return await cancel_on_disconnect(request.receive, state.models.get(name, keep_alive))
