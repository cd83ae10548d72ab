"""The endpoints."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.types import Receive, Scope, Send

import headstart
from headstart.api import LLM
from headstart.errors import GenerationError, HeadstartError, ModelError, TimeLimitError, UsageError
from headstart.server.bridge import Bridge
from headstart.server.errors import document, error_of
from headstart.server.prepare import Formats, Job, chat_job, completion_job, num_choices, rendered
from headstart.server.replies import Reply
from headstart.server.schema import ChatRequest, Common, CompletionRequest, DetokenizeRequest, TokenizeRequest

log = logging.getLogger("headstart.server")
router = APIRouter()
ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"description": text}
    for code, text in {
        400: "The request is wrong.",
        401: "The API key is missing or wrong.",
        404: "There is no such model.",
        413: "The body is too large.",
        500: "The engine failed.",
        503: "Too much waits, or the server is shutting down.",
        504: "The request took longer than --request-timeout.",
    }.items()
}
CLIENT_GONE = 499
"""As nginx calls it; nobody reads it."""
STREAM_ENDED = "data: [DONE]\n\n"


@dataclass(frozen=True)
class State:
    """What the endpoints of one server share. `names`: by which requests may call the model; the first signs the
    answers. `started`: Unix time."""

    bridge: Bridge
    names: tuple[str, ...]
    formats: Formats
    started: int
    request_timeout: float | None


@router.post("/v1/completions", responses=ERRORS)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a text, or several."""
    return await _answer(request, body, partial(completion_job, body=body))


@router.post("/v1/chat/completions", responses=ERRORS)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """The next turn of a conversation."""
    return await _answer(request, body, partial(chat_job, formats=_state(request).formats, body=body))


async def _answer(request: Request, body: Common, prepare: Callable[[LLM], Job]) -> Response:
    state = _state(request)
    _check_model(state, body.model)
    state.bridge.check_room(num_choices(body))
    job = await run_in_threadpool(prepare, state.bridge.llm)
    reply = Reply(state.bridge, job, body, body.model or state.names[0])
    await reply.begin()
    if body.stream:
        return _EventStream(reply, state.request_timeout)
    whole = await _unless_gone(request, _in_time(reply, state.request_timeout))
    return Response(status_code=CLIENT_GONE) if whole is None else JSONResponse(whole)


class _EventStream(StreamingResponse):
    """Whatever becomes of the response, nothing of the reply is left in the engine."""

    def __init__(self, reply: Reply, seconds: float | None) -> None:
        super().__init__(_events(reply, seconds), media_type="text/event-stream")
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.close()


async def _in_time(reply: Reply, seconds: float | None) -> dict[str, Any]:
    try:
        async with asyncio.timeout(seconds):
            return await reply.whole()
    except TimeoutError:
        raise _too_long(seconds) from None


async def _unless_gone(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
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


async def _events(reply: Reply, seconds: float | None) -> AsyncIterator[str]:
    """Server-sent events. An error after the first byte can only be told in the stream."""
    try:
        async with asyncio.timeout(seconds):
            async for chunk in reply.chunks():
                yield f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
        yield STREAM_ENDED
    except TimeoutError:
        yield _told(_too_long(seconds))
    except HeadstartError as error:
        yield _told(error)
    except Exception:
        log.exception("a stream failed")
        yield _told(GenerationError("the server failed on this request"))


def _too_long(seconds: float | None) -> TimeLimitError:
    return TimeLimitError(f"the request took longer than {seconds:g} s", "ask for fewer tokens")


def _told(error: HeadstartError) -> str:
    return f"data: {json.dumps(error_of(error)[1])}\n\n{STREAM_ENDED}"


def _check_model(state: State, name: str | None) -> None:
    if name is not None and name not in state.names:
        raise ModelError(f"the model {name!r} does not exist", f"this server has {', '.join(state.names)}")


def _state(request: Request) -> State:
    state: State = request.app.state.headstart
    return state


@router.get("/v1/models")
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


@router.get("/v1/models/{name:path}", responses={404: ERRORS[404]})
async def model(name: str, request: Request) -> dict[str, Any]:
    """One model."""
    _check_model(_state(request), name)
    entry: dict[str, Any] = next(each for each in (await models(request))["data"] if each["id"] == name)
    return entry


@router.post("/tokenize", responses=ERRORS)
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """Token ids of a text or of messages under the chat template."""
    state = _state(request)
    _check_model(state, body.model)
    llm = state.bridge.llm
    ids = await run_in_threadpool(_tokens, llm, body)
    document: dict[str, Any] = {"count": len(ids), "max_model_len": llm.engine.max_length, "tokens": ids}
    if body.return_token_strs:
        document["token_strs"] = await run_in_threadpool(lambda: [llm.tokenizer.token_text(token) for token in ids])
    return document


def _tokens(llm: LLM, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise UsageError("tokenize needs exactly one of prompt and messages")
    if body.prompt is not None:
        return llm.tokenizer.encode(body.prompt, add_special=body.add_special_tokens)
    chat = ChatRequest(messages=body.messages or [], add_generation_prompt=body.add_generation_prompt)
    return rendered(llm, chat, [])[0]


@router.post("/detokenize", responses=ERRORS)
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    """The text of token ids."""
    state = _state(request)
    _check_model(state, body.model)
    llm = state.bridge.llm
    if wrong := [token for token in body.tokens if not 0 <= token < llm.model.config.vocab_size]:
        raise UsageError(f"token id {wrong[0]} is outside 0..{llm.model.config.vocab_size - 1}")
    return {"prompt": await run_in_threadpool(llm.tokenizer.decode, body.tokens)}


@router.get("/health", responses={503: {"description": "The engine fails, or the server is shutting down."}})
async def health(request: Request) -> Response:
    """200 while requests are answered."""
    bridge = _state(request).bridge
    if not bridge.alive:
        return JSONResponse(document("the engine's thread has ended; see the server's log", 503), 503)
    if bridge.failures > 1:
        return JSONResponse(document(f"{bridge.failures} steps in a row have failed; see the server's log", 503), 503)
    if bridge.draining:
        return JSONResponse(document("the server is shutting down", 503), 503)
    return JSONResponse({"status": "ok"})


@router.get("/version")
async def version() -> dict[str, str]:
    """Of headstart."""
    return {"version": headstart.__version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus, under vLLM's names."""
    text = generate_latest(_state(request).bridge.watch.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
