"""The endpoints."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import Receive, Scope, Send

import headstart
from headstart.api import LLM
from headstart.errors import GenerationError, HeadstartError, ModelError, TimeLimitError, UsageError
from headstart.server import answers, fields, limits
from headstart.server.bridge import Bridge
from headstart.server.chat_prompt import Chat
from headstart.server.documents import Asked, dumped
from headstart.server.errors import document, error_of
from headstart.server.guards import OWNER
from headstart.server.intake import CheckedRoute, Incoming, Intake, lane_of
from headstart.server.prepare import Formats, Job, chat_job, completion_job, encoded, is_constrained, num_choices
from headstart.server.replies import Reply
from headstart.server.schema import ChatRequest, Common, CompletionRequest, DetokenizeRequest, TokenizeRequest

Result = TypeVar("Result")
log = logging.getLogger("headstart.server")
router = APIRouter(route_class=CheckedRoute)
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"description": text, "model": answers.ErrorBody}
    for code, text in {
        400: "The request is wrong.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        408: "The body did not come in time.",
        413: "The body is too large.",
        415: "The body is not JSON.",
        500: "The engine failed.",
        503: "Too much waits, or the server is shutting down.",
        504: "The request took longer than --request-timeout.",
    }.items()
}
CLIENT_GONE = 499
"""As nginx calls it; nobody reads it."""
RETRY = {"Retry-After": "1"}


@dataclass(frozen=True)
class State:
    """What the endpoints of one server share. `names`: by which requests may call the model; the first signs the
    answers. `started`: Unix time."""

    bridge: Bridge
    names: tuple[str, ...]
    formats: Formats
    started: int
    request_timeout: float | None
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


@router.post("/v1/completions", responses=ERRORS, response_model=answers.TextCompletion)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a text, or several."""
    return await _answer(request, body, partial(completion_job, body=body))


@router.post("/v1/chat/completions", responses=ERRORS, response_model=answers.ChatCompletion)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """The next turn of a conversation."""
    return await _answer(request, body, partial(chat_job, formats=_state(request).formats, body=body))


async def _answer(request: Request, body: Common, prepare: Callable[[LLM], Job]) -> Response:
    state, incoming = _state(request), _incoming(request)
    headers = fields.header(fields.check(body.model_extra))
    _check_model(state, body.model)
    if body.stream_options is not None and not body.stream:
        raise UsageError("stream_options is given, but stream is not true", "leave it out")
    if body.speculation is not None and body.speculation.events and not body.stream:
        raise UsageError("speculation.events is true, but stream is not", "they come in the chunks of a stream")
    asked, name, streamed = Asked.of(body), body.model or state.names[0], bool(body.stream)
    lane = "grammar" if is_constrained(body) else lane_of(incoming)

    async def begun() -> Reply:
        job = await state.intake.lanes.run(lane, prepare, state.bridge.llm)
        job = job.owned(request.scope.get(OWNER, ""))
        reply = Reply(state.bridge, state.intake.lanes, job, asked, name)
        await reply.begin()
        return reply

    async def done(reply: Reply) -> bytes:
        async with state.deadline(incoming):
            return await reply.whole()

    with state.bridge.preparing(num_choices(body)):
        async with state.deadline(incoming):
            reply = await _unless_gone(request, begun())
    incoming.release()
    if reply is None:
        return Response(status_code=CLIENT_GONE)
    if streamed:
        return _EventStream(state, incoming, reply, headers)
    whole = await _unless_gone(request, done(reply))
    if whole is None:
        return Response(status_code=CLIENT_GONE)
    return Response(whole, media_type="application/json", headers=headers)


class _EventStream(Response):
    """Server-sent events. Whatever becomes of the response, nothing of the reply is left in the engine."""

    def __init__(self, state: State, incoming: Incoming, reply: Reply, headers: dict[str, str]) -> None:
        self._state, self._incoming, self._reply = state, incoming, reply
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", **headers})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _unless_gone(Request(scope, receive), self._send_all(send))
        finally:
            self._reply.close()

    async def _send_all(self, send: Send) -> None:
        """An error after the first byte can only be told in the stream; a reader that is late is waited for."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def event(text: str, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": more})

        error: HeadstartError | None = None
        try:
            async with self._state.deadline(self._incoming):
                async for chunk in self._reply.chunks():
                    await event(chunk)
        except HeadstartError as found:
            error = found
        except Exception:
            log.exception("a stream failed")
            error = GenerationError("the server failed on this request")
        self._reply.close()
        if error is not None:
            await event(json.dumps(error_of(error)[1]))
        await event("[DONE]", more=False)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
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


def _check_model(state: State, name: str | None) -> None:
    if name is not None and name not in state.names:
        shown = limits.shortened(name)
        raise ModelError(f"the model {shown!r} does not exist", f"this server has {', '.join(state.names)}")


def _state(request: Request) -> State:
    state: State = request.app.state.headstart
    return state


def _incoming(request: Request) -> Incoming:
    incoming: Incoming = request.state.incoming
    return incoming


@router.get("/v1/models", response_model=answers.ModelList)
async def models(request: Request) -> dict[str, Any]:
    """What this server serves."""
    state = _state(request)
    info = state.bridge.llm.info
    entry = {
        "object": "model", "created": state.started, "owned_by": "headstart", "root": info["model"],
        "max_model_len": info["context"],
        **{key: info[key] for key in ("synthetic_acceptance",) if key in info},
    }  # fmt: skip
    return {"object": "list", "data": [{"id": name, **entry} for name in state.names]}


@router.get("/v1/models/{name:path}", responses={404: ERRORS[404]}, response_model=answers.ModelEntry)
async def model(name: str, request: Request) -> dict[str, Any]:
    """One model."""
    _check_model(_state(request), name)
    entry: dict[str, Any] = next(each for each in (await models(request))["data"] if each["id"] == name)
    return entry


@router.post("/tokenize", responses=ERRORS, response_model=answers.Tokenized)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text or of messages under the chat template."""
    state = _state(request)
    headers = fields.header(fields.check(body.model_extra))
    _check_model(state, body.model)
    return await _prepared(request, partial(_tokenized, state, body), headers)


def _tokenized(state: State, body: TokenizeRequest) -> bytes:
    if (body.prompt is None) == (body.messages is None):
        raise UsageError("tokenize needs exactly one of prompt and messages")
    llm = state.bridge.llm
    if body.prompt is not None:
        ids = encoded(llm, body.prompt, body.add_special_tokens)
    else:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        ids = Chat.of(body, tools, state.formats.parse_special).encoded(llm)[0]
    document: dict[str, Any] = {"count": len(ids), "max_model_len": llm.engine.max_length, "tokens": ids}
    if body.return_token_strs:
        document["token_strs"] = [llm.tokenizer.token_text(token) for token in ids]
    return dumped(document).encode()


@router.post("/detokenize", responses=ERRORS, response_model=answers.Detokenized)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids."""
    state = _state(request)
    headers = fields.header(fields.check(body.model_extra))
    _check_model(state, body.model)
    return await _prepared(request, partial(_detokenized, state.bridge.llm, body.tokens), headers)


def _detokenized(llm: LLM, tokens: list[int]) -> bytes:
    size = llm.model.config.vocab_size
    if wrong := [token for token in tokens if not 0 <= token < size]:
        raise UsageError(f"token id {limits.shortened(str(wrong[0]))} is outside 0..{size - 1}")
    return dumped({"prompt": llm.tokenizer.decode(tokens)}).encode()


async def _prepared(request: Request, work: Callable[[], bytes], headers: dict[str, str]) -> Response:
    """The answer of work in a thread, within the request's time."""
    state, incoming = _state(request), _incoming(request)
    async with state.deadline(incoming):
        data = await state.intake.lanes.run(lane_of(incoming), work)
    return Response(data, media_type="application/json", headers=headers)


@router.get("/health", responses={503: {"description": "The engine fails, or the server is shutting down."}})
async def health(request: Request) -> Response:
    """200 while requests are answered."""
    why = _why_not(_state(request).bridge)
    return JSONResponse(document(why, 503), 503, RETRY) if why else JSONResponse({"status": "ok"})


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """As /health, under the name that some platforms ask for."""
    return await health(request)


@router.get("/ready", responses={503: {"description": "The next request would be refused."}})
async def ready(request: Request) -> Response:
    """200 while there is room for another request."""
    bridge = _state(request).bridge
    why = _why_not(bridge) or ("too many requests run or wait" if bridge.is_full else "")
    return JSONResponse(document(why, 503), 503, RETRY) if why else JSONResponse({"status": "ok"})


def _why_not(bridge: Bridge) -> str:
    if not bridge.alive:
        return "the engine's thread has ended; see the server's log"
    if bridge.failures > 1:
        return f"{bridge.failures} steps in a row have failed; see the server's log"
    return "the server is shutting down" if bridge.draining else ""


@router.get("/version")
async def version() -> dict[str, str]:
    """Of headstart."""
    return {"version": headstart.__version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus, under vLLM's names."""
    text = generate_latest(_state(request).bridge.watch.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
