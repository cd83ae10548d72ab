"""`serve --role prefill`: computes prompts for decode servers and hands over their blocks, as files.

One that shares the directory finds them there; another one fetches them, and checks each as if it had read it.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field

from headstart.cache.blocks import keys_of
from headstart.core import Request as EngineRequest, SamplingParams
from headstart.errors import ModelError, UsageError
from headstart.server.answering import CLIENT_GONE, ERRORS, served_by, state_of, unless_gone
from headstart.server.bridge import Bridge
from headstart.server.entries import Served
from headstart.server.guards import OWNER
from headstart.server.intake import CheckedRoute
from headstart.server.prepare import owned

router = APIRouter(route_class=CheckedRoute)
PREFILL, BLOCKS = "/kv/prefill", "/kv/blocks"
SAVED_WITHIN = 60.0
"""Seconds that the last blocks of a prompt may take to be written."""


class PrefillBody(BaseModel):
    """A prompt; `cache_salt` as in a completion."""

    prompt: list[int] = Field(min_length=1)
    cache_salt: str = ""
    model: str | None = None


class Prefilled(BaseModel):
    """`trunk`: the name under which blocks of the trunk lie, which the other server's must equal; `files`: by name, the
    places of blocks in the prompt that are there."""

    trunk: str
    files: dict[str, list[int]]


@router.post(PREFILL, responses=ERRORS, response_model=Prefilled)
async def prefill(body: PrefillBody, request: Request) -> Response:
    """Compute a prompt, and say which blocks of it are stored."""
    if (served := await served_by(request, body.model)) is None:
        return Response(status_code=CLIENT_GONE)
    account = state_of(request).shelf.accounts.named(request.scope.get(OWNER, ""))
    asked = served.llm.request(body.prompt, SamplingParams(max_tokens=1, temperature=0.0, seed=0), depth=0)
    asked = owned(replace(asked, cache_salt=body.cache_salt), account)
    found = await unless_gone(request, _computed(served, asked))
    return Response(status_code=CLIENT_GONE) if found is None else JSONResponse(found)


async def _computed(served: Served, asked: EngineRequest) -> dict[str, Any]:
    stream = await served.bridge.open([asked])
    try:
        async for _ in stream:
            served.bridge.watch.prompt_tokens += len(asked.prompt_ids)
    finally:
        stream.close()
    return await asyncio.get_running_loop().run_in_executor(None, partial(_files, served.bridge, asked))


def _files(bridge: Bridge, asked: EngineRequest) -> dict[str, Any]:
    memory = bridge.llm.engine.memory
    assert memory.spill is not None, "--role prefill needs --kv-spill"
    memory.spill.flush(SAVED_WITHIN)
    keys = list(keys_of(asked.prompt_ids, asked.cache_salt, memory.block_size))
    store, names = memory.spill.store, memory.spill.names
    files = {name: [i for i, key in enumerate(keys) if store.has(name, key)] for name in names.values()}
    return {"trunk": memory.spill.trunk_name, "files": files}


@router.get(f"{BLOCKS}/{{part}}/{{key}}", responses={404: ERRORS[404]})
async def block(part: str, key: str, request: Request) -> Response:
    """One stored block, as its file has it."""
    if (served := await served_by(request, None)) is None:
        return Response(status_code=CLIENT_GONE)
    spill = served.llm.engine.memory.spill
    assert spill is not None, "--role prefill needs --kv-spill"
    if part not in spill.names.values() or len(key) != 32 or not all(digit in "0123456789abcdef" for digit in key):
        raise UsageError("there are no such blocks", "ask as --role decode does")
    data = await run_sync(spill.store.read_file, part, bytes.fromhex(key))
    if data is None:
        raise ModelError("this block is not stored (any more)", "compute it")
    return Response(data, media_type="application/octet-stream")
