"""`serve --role prefill`: computes prompts for decode servers and stores their KV blocks as files.

A decode server that shares the directory of --kv-spill reads the files there; others fetch them over HTTP.
"""

import asyncio
from dataclasses import replace
from typing import Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from headstart.api import LLM
from headstart.cache.blocks import prefix_keys
from headstart.core import Request as EngineRequest, SamplingParams
from headstart.errors import ModelError, UsageError
from headstart.server.body_reader import CheckedRoute, cancel_on_disconnect
from headstart.server.model_manager import ServedModel
from headstart.server.pipeline import ERRORS, account_of, find_model
from headstart.server.prefill_client import BLOCKS_PATH, PREFILL_PATH, PrefillBody, PrefillResult
from headstart.server.prepare import with_owner

router = APIRouter(route_class=CheckedRoute)
FLUSH_TIMEOUT_S = 60.0  # maximum wait until a prompt's last blocks are written


@router.post(PREFILL_PATH, responses=ERRORS, response_model=PrefillResult)
async def prefill(body: PrefillBody, request: Request) -> Response:
    """Compute a prompt. Returns the indices of its stored blocks."""
    served = await find_model(request, body.model)
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    prompt = replace(served.llm.request(body.prompt, params, depth=0), cache_salt=body.cache_salt)
    work = _compute(served, with_owner(prompt, account_of(request)))
    return JSONResponse(await cancel_on_disconnect(request.receive, work))


async def _compute(served: ServedModel, prompt: EngineRequest) -> dict[str, Any]:
    stream = await served.open([prompt])
    try:
        async for _ in stream:
            served.metrics.prompt_tokens += len(prompt.prompt_ids)
    finally:
        stream.close()
    return await asyncio.to_thread(_stored_blocks, served.llm, prompt)


def _stored_blocks(llm: LLM, prompt: EngineRequest) -> dict[str, Any]:
    memory = llm.engine.memory
    assert memory.spill is not None, "--role prefill needs --kv-spill"
    memory.spill.flush(FLUSH_TIMEOUT_S)
    keys = list(prefix_keys(prompt.prompt_ids, prompt.cache_scope, memory.block_size))
    store, names = memory.spill.store, memory.spill.names
    files = {name: [i for i, key in enumerate(keys) if store.has(name, key)] for name in names.values()}
    return {"trunk": memory.spill.trunk_name, "files": files}


@router.get(f"{BLOCKS_PATH}/{{part}}/{{key}}", responses={404: ERRORS[404]})
async def block(part: str, key: str, request: Request) -> Response:
    """The file of one stored block."""
    served = await find_model(request, None)
    spill = served.llm.engine.memory.spill
    assert spill is not None, "--role prefill needs --kv-spill"
    if part not in spill.names.values() or len(key) != 32 or not all(digit in "0123456789abcdef" for digit in key):
        raise UsageError("the path names no stored block", "use the names that /kv/prefill returned")
    data = await run_sync(spill.store.read_file, part, bytes.fromhex(key))
    if data is None:
        raise ModelError("this block is not stored, or no longer", "send the prompt to /kv/prefill again")
    return Response(data, media_type="application/octet-stream")
