"""OpenAI's Responses API: https://platform.openai.com/docs/api-reference/responses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import count
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from headstart.errors import HeadstartError, UsageError
from headstart.server.answering import ERRORS, answer_other
from headstart.server.answers import Answer
from headstart.server.apis.blocks import Block, Change, Told
from headstart.server.apis.responses_body import KEEPS_NOTHING, ResponsesRequest, chat_of, echo_of
from headstart.server.documents import dumped
from headstart.server.errors import error_of
from headstart.server.intake import CheckedRoute
from headstart.server.replies import Reply

Json = dict[str, Any]
router = APIRouter(route_class=CheckedRoute)
PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class ResponseUsage(Answer):
    """Tokens, the seed that repeats the text, and what drafting did."""

    input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    seed: int
    speculation: dict[str, Any]


class ResponseAnswer(Answer):
    """Of /v1/responses; a stream has it in `response` of its last event."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage


@router.post("/v1/responses", responses=ERRORS, response_model=ResponseAnswer)
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """The next turn of a conversation, as items. Nothing is kept."""
    return await answer_other(request, partial(chat_of, body), partial(ResponseTelling, echo_of(body)))


@router.get("/v1/responses/{name}", responses={400: ERRORS[400]}, include_in_schema=False)
@router.delete("/v1/responses/{name}", responses={400: ERRORS[400]}, include_in_schema=False)
async def response(name: str) -> Response:
    """There are none."""
    raise UsageError("responses cannot be asked for again", KEEPS_NOTHING)


class ResponseTelling:
    """A response, or the events that make it. `echo`: what it says again of its request."""

    media_type, end = "text/event-stream", ""

    def __init__(self, echo: Json, reply: Reply) -> None:
        self._echo, self._reply, self._told = echo, reply, Told(reply)
        self._numbers = count()

    async def whole(self) -> bytes:
        await self._told.gather()
        return dumped(self._ended()).encode()

    async def events(self) -> AsyncIterator[str]:
        begun = self._response("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        async for change in self._told.changes():
            status = "incomplete" if change.is_last and self._told.was_cut else "completed"
            for kind, members in _events(change, status):
                yield self._event(kind, output_index=change.block.index, **members)
        ended = self._ended()
        yield self._event(f"response.{ended['status']}", response=ended)

    def failed(self, error: HeadstartError) -> str:
        status, document = error_of(error)
        found = document["error"]
        code = "server_error" if status >= 500 else "invalid_prompt"
        return self._event("error", code=code, message=found["message"], param=found["param"])

    def _event(self, kind: str, **members: Any) -> str:
        document = {"type": kind, "sequence_number": next(self._numbers), **members}
        return f"event: {kind}\ndata: {dumped(document)}\n\n"

    def _ended(self) -> Json:
        """What is cut off, is so in the last item."""
        blocks, status = self._told.blocks.all, "incomplete" if self._told.was_cut else "completed"
        output = [_item(block, status if block is blocks[-1] else "completed") for block in blocks]
        document = self._response(status, output)
        if self._told.was_cut:
            document["incomplete_details"] = {"reason": "max_output_tokens"}
        return document | {"usage": self._usage()}

    def _response(self, status: str, output: list[Json]) -> Json:
        return {
            "id": f"resp_{self._reply.id.rpartition('-')[2]}",
            "object": "response",
            "created_at": self._reply.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._reply.model,
            "output": output,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "temperature": self._reply.params.temperature,
            "top_p": self._reply.params.top_p,
            "usage": None,
            **self._echo,
        }

    def _usage(self) -> Json:
        usage = self._reply.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._told.num_thought},
            "total_tokens": usage["total_tokens"],
            "seed": usage["seed"],
            "speculation": usage["speculation"],
        }


def _item(block: Block, status: str) -> Json:
    item: Json = {"id": f"{PREFIXES[block.kind]}_{block.id}", "status": status}
    if block.kind == "call":
        call = {"call_id": f"call_{block.id}", "name": block.name, "arguments": block.text}
        return {**item, "type": "function_call", **call}
    if block.kind == "reasoning":
        return {**item, "type": "reasoning", "summary": [], "content": [_part(block, block.text)]}
    return {**item, "type": "message", "role": "assistant", "content": [_part(block, block.text)]}


def _part(block: Block, text: str) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _events(change: Change, status: str) -> Iterator[tuple[str, Json]]:
    """An item begins, its one part grows, and both are complete; a call has no parts."""
    block = change.block
    item = _item(block, status)
    if change.what == "open":
        empty: Json = {} if block.kind == "call" else {"content": []}
        yield "response.output_item.added", {"item": {**item, "status": "in_progress", **empty}}
    place: Json = {"item_id": item["id"]} | ({} if block.kind == "call" else {"content_index": 0})
    if change.what == "open" and block.kind != "call":
        yield "response.content_part.added", {**place, "part": _part(block, "")}
    names = {"call": "function_call_arguments", "reasoning": "reasoning_text", "text": "output_text"}
    name = f"response.{names[block.kind]}"
    logprobs: Json = {"logprobs": []} if block.kind == "text" else {}
    if change.what == "more":
        yield f"{name}.delta", {**place, "delta": change.text, **logprobs}
    elif change.what == "close":
        done = {"name": block.name, "arguments": block.text} if block.kind == "call" else {"text": block.text}
        yield f"{name}.done", {**place, **done, **logprobs}
        if block.kind != "call":
            yield "response.content_part.done", {**place, "part": _part(block, block.text)}
        yield "response.output_item.done", {"item": item}
