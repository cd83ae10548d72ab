"""Ollama's API: https://docs.ollama.com/api. One model, always loaded."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

import headstart
from headstart.errors import HeadstartError
from headstart.server.answering import answer_other, check_model, errors_in, state_of
from headstart.server.answers import Answer
from headstart.server.apis.blocks import Block, Change, Told
from headstart.server.apis.described import described
from headstart.server.apis.ollama_body import (
    Asking,
    GenerateRequest,
    OllamaChatRequest,
    ShowRequest,
    chat_of,
    prompt_of,
)
from headstart.server.documents import dumped
from headstart.server.errors import error_of
from headstart.server.intake import CheckedRoute
from headstart.server.replies import Reply

Json = dict[str, Any]
router = APIRouter(route_class=CheckedRoute)
SPOKEN = "0.12.0"
"""The version of Ollama whose API this is: clients look at it before they use what is new."""
NEVER = "2318-01-01T00:00:00+00:00"
"""When the model is unloaded; clients want a date."""


class OllamaError(Answer):
    """Ollama's shape of every error."""

    error: str


class OllamaTold(Answer):
    """What both kinds of answers have; durations in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"]
    total_duration: int = Field(default=0, ge=0)
    prompt_eval_count: int = Field(default=0, ge=0)
    eval_count: int = Field(default=0, ge=0)


class OllamaChat(OllamaTold):
    """Of /api/chat; a stream has it in pieces, a line each."""

    message: dict[str, Any]


class OllamaGeneration(OllamaTold):
    """Of /api/generate; a stream has it in pieces, a line each."""

    response: str


class OllamaModels(Answer):
    """Of /api/tags and /api/ps."""

    models: list[dict[str, Any]]


ERRORS = errors_in(OllamaError)


@router.post("/api/chat", responses=ERRORS, response_model=OllamaChat)
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """The next turn of a conversation, in Ollama's words. Streams, unless told not to."""
    if not body.messages:
        return _loaded(body, request, message={"role": "assistant", "content": ""})
    return await answer_other(request, partial(chat_of, body), ChatTelling)


@router.post("/api/generate", responses=ERRORS, response_model=OllamaGeneration)
async def generate(body: GenerateRequest, request: Request) -> Response:
    """The answer to one prompt. Streams, unless told not to."""
    if not body.prompt:
        return _loaded(body, request, response="")
    return await answer_other(request, partial(prompt_of, body), GenerateTelling)


def _loaded(body: Asking, request: Request, **said: Any) -> Response:
    """Whoever asks nothing wants the model in memory, where it is."""
    check_model(state_of(request), body.model)
    return JSONResponse({"model": body.model, "created_at": _now(), **said, "done": True, "done_reason": "load"})


@router.get("/api/tags", response_model=OllamaModels)
async def tags(request: Request) -> Json:
    """What this server serves."""
    state = state_of(request)
    return {"models": [described(state.bridge.llm, name).listed for name in state.names]}


@router.get("/api/ps", response_model=OllamaModels)
async def ps(request: Request) -> Json:
    """What is in memory: the same."""
    state = state_of(request)
    llm = state.bridge.llm
    more = {"expires_at": NEVER, "size_vram": 0, "context_length": llm.engine.max_length}
    return {"models": [{**described(llm, name).listed, **more} for name in state.names]}


@router.post("/api/show", responses=ERRORS)
async def show(body: ShowRequest, request: Request) -> Response:
    """One model: its sizes, its chat template, what it can do."""
    state = state_of(request)
    check_model(state, body.model)
    return JSONResponse(described(state.bridge.llm, body.model).shown(state.formats))


@router.get("/api/version")
async def version() -> dict[str, str]:
    """Of Ollama's API that is spoken, and of headstart."""
    return {"version": SPOKEN, "headstart": headstart.__version__}


class ChatTelling:
    """Lines of JSON, or the one document."""

    media_type, end = "application/x-ndjson", ""

    def __init__(self, reply: Reply) -> None:
        self._reply, self._told = reply, Told(reply)

    async def whole(self) -> bytes:
        await self._told.gather()
        return dumped(self._document(self._said(self._told.blocks.all), self._ended())).encode()

    async def events(self) -> AsyncIterator[str]:
        async for change in self._told.changes():
            if piece := _piece(change):
                yield self._line(self._said([piece]), {"done": False})
        yield self._line(self._said([]), self._ended())

    def failed(self, error: HeadstartError) -> str:
        return json.dumps(error_of(error, "/api/")[1]) + "\n"

    def _said(self, blocks: list[Block]) -> Json:
        texts = _texts(blocks)
        calls = [{"function": {"name": each.name, "arguments": each.arguments}} for each in blocks if each.name]
        thought = {"thinking": texts["reasoning"]} if texts["reasoning"] else {}
        more = {"tool_calls": calls} if calls else {}
        return {"message": {"role": "assistant", "content": texts["text"], **thought, **more}}

    def _line(self, said: Json, more: Json) -> str:
        return dumped(self._document(said, more)) + "\n"

    def _document(self, said: Json, more: Json) -> Json:
        return {"model": self._reply.model, "created_at": _now(), **said, **more}

    def _ended(self) -> Json:
        choice, usage = self._told.answer.choice, self._reply.usage()
        completion = self._told.answer.completion
        timing = completion.timing if completion else {"ttft_s": 0.0, "decode_s": 0.0}
        return {
            "done": True,
            "done_reason": "length" if self._told.was_cut else "stop",
            "total_duration": _nanoseconds(time.perf_counter() - choice.started),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(timing["ttft_s"]),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(timing["decode_s"]),
            "seed": usage["seed"],
            "speculation": usage["speculation"],
        }


class GenerateTelling(ChatTelling):
    """The same with the text under another name."""

    def _said(self, blocks: list[Block]) -> Json:
        texts = _texts(blocks)
        return {"response": texts["text"], **({"thinking": texts["reasoning"]} if texts["reasoning"] else {})}


def _piece(change: Change) -> Block | None:
    """What a change adds: text as it comes, calls when they are complete."""
    is_call = change.block.kind == "call"
    if change.what == "more" and not is_call:
        return Block(change.block.kind, change.block.index, text=change.text)
    return change.block if change.what == "close" and is_call else None


def _texts(blocks: list[Block]) -> dict[str, str]:
    return {kind: "".join(each.text for each in blocks if each.kind == kind) for kind in ("text", "reasoning")}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
