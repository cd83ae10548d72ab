"""Endpoints beside generation: models, tokenizing, prompts as token ids, health and metrics."""

import uuid
from datetime import UTC, datetime
from typing import Any, Literal

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from headstart.errors import UsageError
from headstart.server import limits, schema
from headstart.server.apis.responses import ResponsesRequest, chat_of
from headstart.server.body_reader import CheckedRoute, pool_of
from headstart.server.errors import error_body
from headstart.server.metrics import exposition
from headstart.server.model_manager import ModelManager, ModelSlot, ServedModel, context_length
from headstart.server.pipeline import ERRORS, body_of, respond_from_thread, state_of
from headstart.server.prepare import encode_chat, encode_text, prompt_ids
from headstart.server.renderer import dump_json
from headstart.server.replicas import metrics as replica_metrics
from headstart.version import __version__

router = APIRouter(route_class=CheckedRoute)
RETRY = {"Retry-After": "1"}


class ModelEntry(schema.ResponseModel):
    """One name of the model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(schema.ResponseModel):
    """Of /v1/models."""

    object: Literal["list"]
    data: list[ModelEntry]


class Tokenized(schema.ResponseModel):
    """Of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(schema.ResponseModel):
    """Of /detokenize."""

    prompt: str


@router.get("/v1/models", response_model=ModelList)
async def models(request: Request) -> dict[str, Any]:
    """The models of this server, for clients of OpenAI's API and of Anthropic's."""
    state = state_of(request)
    data = [each for slot in state.models.slots for each in await _list_entries(state.models, slot, state.started)]
    return {"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}


async def _list_entries(models: ModelManager, slot: ModelSlot, started: int) -> list[dict[str, Any]]:
    """A model under each of its names; `loaded` tells whether it is in memory, on servers of several models."""
    info = slot.served.llm.info if slot.served else {}
    context = info["context"] if info else await run_sync(context_length, slot)
    document = {
        "object": "model", "created": started, "owned_by": "headstart", "root": info.get("model") or slot.root,
        "max_model_len": context, "type": "model", "max_input_tokens": context,
        "created_at": datetime.fromtimestamp(started, UTC).isoformat(),
        **{key: info[key] for key in ("synthetic_acceptance",) if key in info},
        **({} if models.is_fixed else {"loaded": slot.served is not None}),
    }  # fmt: skip
    return [{"id": name, "display_name": name, **document} for name in slot.spec.names]


@router.get("/v1/models/{name:path}", responses={404: ERRORS[404]}, response_model=ModelEntry)
async def model(name: str, request: Request) -> dict[str, Any]:
    """One model."""
    state = state_of(request)
    entries = await _list_entries(state.models, state.models.find(name), state.started)
    return next((each for each in entries if each["id"] == name), entries[0])


@router.post("/tokenize", responses=ERRORS, response_model=Tokenized)
async def tokenize(body: schema.TokenizeRequest, request: Request) -> Response:
    """Token ids of a text or of messages under the chat template."""
    headers = schema.ignored_fields_header(body)
    return await respond_from_thread(request, body.model, lambda served: _tokenize(served, body), headers)


def _tokenize(served: ServedModel, body: schema.TokenizeRequest) -> bytes:
    if (body.prompt is None) == (body.messages is None):
        raise UsageError("tokenize needs exactly one of prompt and messages")
    llm = served.llm
    if body.prompt is not None:
        ids = encode_text(llm, body.prompt, body.add_special_tokens)
    else:
        ids = encode_chat(llm, served.formats, body)[0]
    document: dict[str, Any] = {"count": len(ids), "max_model_len": llm.engine.max_length, "tokens": ids}
    if body.return_token_strs:
        document["token_strs"] = [llm.tokenizer.token_text(token) for token in ids]
    return dump_json(document).encode()


@router.post("/detokenize", responses=ERRORS, response_model=Detokenized)
async def detokenize(body: schema.DetokenizeRequest, request: Request) -> Response:
    """The text of token ids."""
    headers = schema.ignored_fields_header(body)
    return await respond_from_thread(request, body.model, lambda served: _detokenize(served, body.tokens), headers)


def _detokenize(served: ServedModel, tokens: list[int]) -> bytes:
    llm = served.llm
    size = llm.model.config.vocab_size
    if wrong := [token for token in tokens if not 0 <= token < size]:
        raise UsageError(f"token id {limits.shortened(str(wrong[0]))} is outside 0..{size - 1}")
    return dump_json({"prompt": llm.tokenizer.decode(tokens)}).encode()


@router.get("/health", responses={503: {"description": "The engine fails, or the server is shutting down."}})
async def health(request: Request) -> Response:
    """200 while requests are answered; `drafting` is "paused" while a head's drafts are not accepted; `broken_heads`
    names models whose MTP head is not whole, and the remedy; `fingerprint`: of a replica."""
    state = state_of(request)
    models = state.models
    if why := _fault(models):
        return JSONResponse(error_body(why, 503), 503, RETRY)
    is_paused = any(each.llm.engine.head_health.is_paused for each in models.loaded)
    broken = {each.llm.model.name: each.llm.model.broken_head for each in models.loaded if each.llm.model.broken_head}
    more = {**({"drafting": "paused"} if is_paused else {}), **({"broken_heads": broken} if broken else {})}
    own = {"fingerprint": models.loaded[0].fingerprint} if state.replica is not None else {}
    return JSONResponse({"status": "ok", **more, **own})


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """As /health, under a name that some platforms use."""
    return await health(request)


@router.get("/ready", responses={503: {"description": "The next request would be refused."}})
async def ready(request: Request) -> Response:
    """200 while there is room for another request."""
    models = state_of(request).models
    is_full = bool(models.loaded) and all(each.admission.is_full for each in models.loaded)
    why = _fault(models) or ("too many requests run or wait" if is_full else "")
    return JSONResponse(error_body(why, 503), 503, RETRY) if why else JSONResponse({"status": "ok"})


def _fault(models: ModelManager) -> str:
    """Why no request is answered; empty where one of the loaded models works, or none is loaded."""
    if models.draining:
        return "the server is shutting down"
    faults = [each.fault for each in models.loaded]
    return faults[0] if faults and all(faults) else ""


@router.get("/version")
async def version() -> dict[str, str]:
    """The version of headstart."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus, under vLLM's names; a replica behind a router answers for all of them."""
    return Response(await _exposition(request), media_type=CONTENT_TYPE_LATEST)


@router.get("/replicas")
async def replicas(request: Request) -> dict[str, Any]:
    """The replicas behind the router of this server; none without a router."""
    replica = state_of(request).replica
    found = []
    if replica is not None:
        found = await replica_metrics.list_replicas(replica, (await _exposition(request, own=True)).decode())
    return {"replicas": found}


async def _exposition(request: Request, *, own: bool = False) -> bytes:
    """The text of /metrics. `own`: of this process alone."""
    state = state_of(request)
    text = exposition([each.metrics for each in state.models.loaded], state.models.metrics())
    if own or state.replica is None or request.headers.get(replica_metrics.OWN_HEADER) == state.replica.token:
        return text
    return exposition([], await replica_metrics.collect(state.replica, text.decode()))


class Rendered(BaseModel):
    """One prompt as token ids, under vLLM's names. Routers use it to send requests where their prefix is cached."""

    request_id: str
    model: str
    token_ids: list[int] = Field(description="The prompt under the chat template, cut where the request says so.")


@router.post("/v1/chat/completions/render", responses=ERRORS, response_model=Rendered)
async def chat(body: schema.ChatRequest, request: Request) -> Response:
    """The prompt that a chat completion of this body would have."""
    return await _render(body, request)


@router.post("/v1/completions/render", responses=ERRORS, response_model=list[Rendered])
async def completion(body: schema.CompletionRequest, request: Request) -> Response:
    """The prompts that a completion of this body would have."""
    return await _render(body, request, several=True)


@router.post("/v1/responses/render", responses=ERRORS, response_model=Rendered)
async def response(body: ResponsesRequest, request: Request) -> Response:
    """The prompt that a response to this body would have."""
    state, incoming = state_of(request), body_of(request)
    async with state.deadline(incoming):
        translated = await state.body_reader.pools.run(pool_of(incoming), chat_of, body)
    return await _render(translated, request)


async def _render(body: schema.Common, request: Request, *, several: bool = False) -> Response:
    headers = schema.ignored_fields_header(body)
    return await respond_from_thread(request, body.model, lambda served: _prompts(served, body, several), headers)


def _prompts(served: ServedModel, body: schema.Common, several: bool) -> bytes:
    found: list[dict[str, Any]] = [
        {"request_id": f"render-{uuid.uuid4().hex}", "model": body.model or served.names[0], "token_ids": ids}
        for ids in prompt_ids(served.llm, served.formats, body)
    ]
    return dump_json(found if several else found[0]).encode()
