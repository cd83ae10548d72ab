"""Ollama's API: https://docs.ollama.com/api."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

import headstart
from headstart.errors import HeadstartError
from headstart.server.answering import CLIENT_GONE, answer_other, errors_in, served_by, state_of
from headstart.server.answers import Answer
from headstart.server.apis.blocks import Block, Change, Told
from headstart.server.apis.described import listed, shown
from headstart.server.apis.ollama_body import (
    Asking,
    GenerateRequest,
    OllamaChatRequest,
    ShowRequest,
    chat_of,
    keep_of,
    prompt_of,
)
from headstart.server.documents import dumped
from headstart.server.entries import Entry
from headstart.server.errors import error_of
from headstart.server.intake import CheckedRoute
from headstart.server.replies import Reply

Json = dict[str, Any]
router = APIRouter(route_class=CheckedRoute)
SPOKEN = "0.12.0"
"""The version of Ollama whose API this is: clients look at it before they use what is new."""
NEVER = "2318-01-01T00:00:00+00:00"
"""When a model that stays is unloaded; clients want a date."""


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
        return await _moved(body, request, message={"role": "assistant", "content": ""})
    return await answer_other(request, partial(chat_of, body), ChatTelling, keep_of(body))


@router.post("/api/generate", responses=ERRORS, response_model=OllamaGeneration)
async def generate(body: GenerateRequest, request: Request) -> Response:
    """The answer to one prompt. Streams, unless told not to."""
    if not body.prompt:
        return await _moved(body, request, response="")
    return await answer_other(request, partial(prompt_of, body), GenerateTelling, keep_of(body))


async def _moved(body: Asking, request: Request, **said: Any) -> Response:
    """Whoever asks nothing wants the model in memory; with a keep_alive of 0, out of it."""
    keep_alive, reason = keep_of(body), "load"
    if keep_alive is not None and keep_alive.seconds == 0:
        reason = "unload" if await state_of(request).shelf.release(body.model) else "load"
    elif await served_by(request, body.model, keep_alive) is None:
        return Response(status_code=CLIENT_GONE)
    return JSONResponse({"model": body.model, "created_at": _now(), **said, "done": True, "done_reason": reason})


@router.get("/api/tags", response_model=OllamaModels)
async def tags(request: Request) -> Json:
    """What this server serves, in memory or not."""
    shelf = state_of(request).shelf
    return {"models": [each for entry in shelf.entries for each in await run_sync(listed, entry)]}


@router.get("/api/ps", response_model=OllamaModels)
async def ps(request: Request) -> Json:
    """What is in memory, and how long."""
    found: list[Json] = []
    for entry in state_of(request).shelf.entries:
        if entry.served is not None:
            more = {"expires_at": _expires(entry), "size_vram": 0, "context_length": entry.served.llm.engine.max_length}
            found += [{**each, **more} for each in await run_sync(listed, entry)]
    return {"models": found}


def _expires(entry: Entry) -> str:
    left = entry.expires
    return NEVER if left is None else (datetime.now(UTC) + timedelta(seconds=left)).isoformat()


@router.post("/api/show", responses=ERRORS)
async def show(body: ShowRequest, request: Request) -> Response:
    """One model: its sizes, its chat template, what it can do."""
    entry = state_of(request).shelf.find(body.model)
    return JSONResponse(await run_sync(shown, entry, body.model))


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
