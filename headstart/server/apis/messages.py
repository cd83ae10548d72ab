"""Anthropic's Messages API: https://platform.claude.com/docs/en/api/messages."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from headstart.errors import HeadstartError
from headstart.server import fields
from headstart.server.answering import answer_other, errors_in, prepared
from headstart.server.answers import Answer
from headstart.server.apis.blocks import Block, Change, Told
from headstart.server.apis.messages_body import CountRequest, MessagesRequest, chat_of
from headstart.server.chat_prompt import Chat
from headstart.server.documents import dumped
from headstart.server.entries import Served
from headstart.server.errors import error_of
from headstart.server.intake import CheckedRoute
from headstart.server.replies import Reply
from headstart.server.schema import ChatRequest

Json = dict[str, Any]
PATH = "/v1/messages"
router = APIRouter(route_class=CheckedRoute)


class MessagesFault(Answer):
    """What was wrong, and of which kind."""

    type: str
    message: str


class MessagesError(Answer):
    """Anthropic's shape of every error."""

    type: Literal["error"]
    error: MessagesFault


class MessageUsage(Answer):
    """Tokens: the prompt's that were computed, those found in the cache, the output's."""

    input_tokens: int = Field(ge=0)
    cache_read_input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)


class MessageAnswer(Answer):
    """Of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(Answer):
    """Of /v1/messages/count_tokens."""

    input_tokens: int = Field(ge=0)


ERRORS = errors_in(MessagesError)


@router.post(PATH, responses=ERRORS, response_model=MessageAnswer)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """The next turn of a conversation, in Anthropic's words."""
    return await answer_other(request, partial(chat_of, body), MessageTelling)


@router.post(f"{PATH}/count_tokens", responses=ERRORS, response_model=TokenCount)
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Tokens of the prompt that messages come to."""
    headers = fields.header(fields.check(body.model_extra))
    return await prepared(request, body.model, lambda served: _counted(served, body), headers)


def _counted(served: Served, body: CountRequest) -> bytes:
    chat: ChatRequest = chat_of(body)
    tools = [tool.model_dump(exclude_none=True) for tool in chat.tools or () if chat.tool_choice != "none"]
    ids = Chat.of(chat, tools, served.formats.parse_special).encoded(served.llm)[0]
    return dumped({"input_tokens": len(ids)}).encode()


class MessageTelling:
    """A message, or the events that make it."""

    media_type, end = "text/event-stream", ""

    def __init__(self, reply: Reply) -> None:
        self._reply, self._told = reply, Told(reply)

    async def whole(self) -> bytes:
        await self._told.gather()
        content = [_whole(block) for block in self._told.blocks.all]
        return dumped({**self._head(content), **self._stop(), "usage": self._usage()}).encode()

    async def events(self) -> AsyncIterator[str]:
        none = {"stop_reason": None, "stop_sequence": None}
        counts = {"input_tokens": self._reply.num_prompt, "output_tokens": 0}
        yield _event("message_start", message={**self._head([]), **none, "usage": counts})
        yield _event("ping")
        async for change in self._told.changes():
            for event in _events(change):
                yield event
        yield _event("message_delta", delta=self._stop(), usage=self._usage())
        yield _event("message_stop")

    def failed(self, error: HeadstartError) -> str:
        return f"event: error\ndata: {json.dumps(error_of(error, PATH)[1])}\n\n"

    def _head(self, content: list[Json]) -> Json:
        name = f"msg_{self._reply.id.rpartition('-')[2]}"
        return {
            "id": name, "type": "message", "role": "assistant", "model": self._reply.model, "content": content,
        }  # fmt: skip

    def _stop(self) -> Json:
        answer = self._told.answer
        choice, reason = answer.choice, answer.finish_reason
        stop = choice.output.stop_string
        room = len(choice.tokens) < choice.request.params.max_tokens
        reasons = {
            "tool_calls": "tool_use",
            "length": "model_context_window_exceeded" if room else "max_tokens",
            "stop": "end_turn" if stop is None else "stop_sequence",
        }
        return {"stop_reason": reasons[reason or "stop"], "stop_sequence": stop}

    def _usage(self) -> Json:
        """Anthropic counts what was cached beside the rest of the prompt."""
        usage = self._reply.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self._told.num_thought},
            "seed": usage["seed"],
            "speculation": usage["speculation"],
        }


def _whole(block: Block) -> Json:
    if block.kind == "call":
        return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": block.arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _events(change: Change) -> list[str]:
    block = change.block
    if change.what == "open":
        return [
            _event(
                "content_block_start",
                index=block.index,
                content_block=_whole(Block(block.kind, 0, block.name, id=block.id)),
            )
        ]
    if change.what == "more":
        delta: Json = {"type": "text_delta", "text": change.text}
        if block.kind == "call":
            delta = {"type": "input_json_delta", "partial_json": change.text}
        elif block.kind == "reasoning":
            delta = {"type": "thinking_delta", "thinking": change.text}
        return [_event("content_block_delta", index=block.index, delta=delta)]
    return [_event("content_block_stop", index=block.index)]


def _event(kind: str, **members: Any) -> str:
    return f"event: {kind}\ndata: {dumped({'type': kind, **members})}\n\n"
