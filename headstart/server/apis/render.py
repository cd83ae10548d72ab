"""Prompts as token ids, under vLLM's names: routers that send requests where their prefix is ask for them."""

from __future__ import annotations

import uuid
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from headstart.server import fields
from headstart.server.answering import ERRORS, incoming_of, prepared, state_of
from headstart.server.apis.responses_body import ResponsesRequest, chat_of
from headstart.server.documents import dumped
from headstart.server.entries import Served
from headstart.server.intake import CheckedRoute, lane_of
from headstart.server.prepare import prompt_ids
from headstart.server.schema import ChatRequest, Common, CompletionRequest

router = APIRouter(route_class=CheckedRoute)


class Rendered(BaseModel):
    """One prompt, as the engine would read it."""

    request_id: str
    model: str
    token_ids: list[int] = Field(description="The prompt under the chat template, cut where the request says so.")


@router.post("/v1/chat/completions/render", responses=ERRORS, response_model=Rendered)
async def chat(body: ChatRequest, request: Request) -> Response:
    """The prompt that a chat completion of this body would have."""
    return await _rendered(body, request)


@router.post("/v1/completions/render", responses=ERRORS, response_model=list[Rendered])
async def completion(body: CompletionRequest, request: Request) -> Response:
    """The prompts that a completion of this body would have."""
    return await _rendered(body, request, several=True)


@router.post("/v1/responses/render", responses=ERRORS, response_model=Rendered)
async def response(body: ResponsesRequest, request: Request) -> Response:
    """The prompt that a response to this body would have."""
    state, incoming = state_of(request), incoming_of(request)
    async with state.deadline(incoming):
        translated = await state.intake.lanes.run(lane_of(incoming), chat_of, body)
    return await _rendered(translated, request)


async def _rendered(body: Common, request: Request, *, several: bool = False) -> Response:
    headers = fields.header(fields.check(body.model_extra))
    return await prepared(request, body.model, lambda served: _document(served, body, several), headers)


def _document(served: Served, body: Common, several: bool) -> bytes:
    found: list[dict[str, Any]] = [
        {"request_id": f"render-{uuid.uuid4().hex}", "model": body.model or served.names[0], "token_ids": ids}
        for ids in prompt_ids(served.llm, served.formats, body)
    ]
    return dumped(found if several else found[0]).encode()
