"""Endpoints that generate no text: models, tokenizing, prompts as token ids, health and metrics."""

import uuid
from datetime import UTC, datetime
from typing import Any, Literal

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
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
from headstart.server.replicas import metrics as replica_metrics
from headstart.version import __version__

router = APIRouter(route_class=CheckedRoute)
RETRY = {"Retry-After": "1"}  # seconds


class ModelEntry(schema.ResponseModel):
    """One name of a served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    parent: str | None = Field(default=None, description="Of a LoRA adapter: the model that it changes.")


class ModelList(schema.ResponseModel):
    """Response of /v1/models."""

    object: Literal["list"]
    data: list[ModelEntry]


class Tokenized(schema.ResponseModel):
    """Response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(schema.ResponseModel):
    """Response of /detokenize."""

    prompt: str


@router.get("/v1/models", response_model=ModelList)
async def models(request: Request) -> dict[str, Any]:
    """The models of this server, with the fields of OpenAI's and of Anthropic's API."""
    state = state_of(request)
    data = [each for slot in state.models.slots for each in await _list_entries(state.models, slot, state.started)]
    return {"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}


async def _list_entries(models: ModelManager, slot: ModelSlot, started: int) -> list[dict[str, Any]]:
    """One list entry for each name of a model. On servers of several models, `loaded` is whether it is in memory."""
    info = slot.served.llm.info if slot.served else {}
    context = info["context"] if info else await run_sync(context_length, slot)
    document = {
        "object": "model", "created": started, "owned_by": "headstart", "root": info.get("model") or slot.root,
        "max_model_len": context, "type": "model", "max_input_tokens": context,
        "created_at": datetime.fromtimestamp(started, UTC).isoformat(),
        **{key: info[key] for key in ("synthetic_acceptance",) if key in info},
        **({} if models.is_fixed else {"loaded": slot.served is not None}),
    }  # fmt: skip
    entries = [{"id": name, "display_name": name, **document} for name in slot.spec.names]
    for name, path in slot.adapters.items():
        entries.append({**document, "id": name, "display_name": name, "root": path, "parent": slot.name})
    return entries


@router.get("/v1/models/{name:path}", responses={404: ERRORS[404]}, response_model=ModelEntry)
async def model(name: str, request: Request) -> dict[str, Any]:
    """The entry of one model in /v1/models."""
    state = state_of(request)
    entries = await _list_entries(state.models, state.models.find(name), state.started)
    return next((each for each in entries if each["id"] == name), entries[0])


@router.post("/tokenize", responses=ERRORS, response_model=Tokenized)
async def tokenize(body: schema.TokenizeRequest, request: Request) -> Response:
    """Token ids of a text or of messages under the chat template."""
    return await respond_from_thread(request, body, _tokenize)


def _tokenize(served: ServedModel, body: schema.TokenizeRequest) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise UsageError("tokenize needs exactly one of prompt and messages")
    llm = served.llm
    if body.prompt is not None:
        ids = encode_text(llm, body.prompt, body.add_special_tokens)
    else:
        ids = encode_chat(llm, served.formats, body).ids
    document: dict[str, Any] = {"count": len(ids), "max_model_len": llm.engine.max_length, "tokens": ids}
    if body.return_token_strs:
        document["token_strs"] = [llm.tokenizer.token_text(token) for token in ids]
    return document


@router.post("/detokenize", responses=ERRORS, response_model=Detokenized)
async def detokenize(body: schema.DetokenizeRequest, request: Request) -> Response:
    """The text of token ids."""
    return await respond_from_thread(request, body, _detokenize)


def _detokenize(served: ServedModel, body: schema.DetokenizeRequest) -> dict[str, str]:
    llm = served.llm
    size = llm.model.config.vocab_size
    if wrong := [token for token in body.tokens if not 0 <= token < size]:
        raise UsageError(f"token id {limits.shortened(str(wrong[0]))} is outside 0..{size - 1}")
    return {"prompt": llm.tokenizer.decode(body.tokens)}


@router.get("/health", responses={503: {"description": "The engine fails, or the server is shutting down."}})
async def health(request: Request) -> Response:
    """200 while the server answers requests. `drafting`: "paused" while too few drafts are accepted. `broken_heads`:
    models whose MTP head is incomplete -> the remedy. `fingerprint`: only of replicas, see ServedModel."""
    state = state_of(request)
    models = state.models
    if why := _fault(models):
        return JSONResponse(error_body(why, 503), 503, RETRY)
    is_paused = any(each.llm.engine.head_health.is_paused for each in models.loaded)
    broken = {each.llm.model.name: each.llm.model.broken_head for each in models.loaded if each.llm.model.broken_head}
    more = {**({"drafting": "paused"} if is_paused else {}), **({"broken_heads": broken} if broken else {})}
    own = {"fingerprint": models.loaded[0].fingerprint} if state.replica is not None else {}
    return JSONResponse({"status": "ok", **more, **own})


@router.get("/", include_in_schema=False)
async def root() -> Response:
    """200 if no web pages are served: the `ollama` program sends HEAD / before each command."""
    return PlainTextResponse("headstart is running")


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """The same as /health, under a name that some platforms use."""
    return await health(request)


@router.get("/ready", responses={503: {"description": "The next request would be refused."}})
async def ready(request: Request) -> Response:
    """200 while the queue has a place for another request."""
    models = state_of(request).models
    is_full = bool(models.loaded) and all(each.admission.is_full for each in models.loaded)
    why = _fault(models) or ("too many requests run or wait" if is_full else "")
    return JSONResponse(error_body(why, 503), 503, RETRY) if why else JSONResponse({"status": "ok"})


def _fault(models: ModelManager) -> str:
    """The reason why the server answers no requests; empty if a loaded model works or none is loaded."""
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
    """Metrics for Prometheus, under vLLM's names. A replica behind a router adds up the metrics of all replicas."""
    return Response(await _exposition(request), media_type=CONTENT_TYPE_LATEST)


@router.get("/replicas")
async def replicas(request: Request) -> dict[str, Any]:
    """State of the replicas behind this server's router; an empty list without a router."""
    replica = state_of(request).replica
    found = []
    if replica is not None:
        found = await replica_metrics.list_replicas(replica, (await _exposition(request, own=True)).decode())
    return {"replicas": found}


async def _exposition(request: Request, *, own: bool = False) -> bytes:
    """The text of /metrics, of all replicas. `own`, or a request from another replica: of this process only."""
    state = state_of(request)
    text = exposition([each.metrics for each in state.models.loaded], state.models.metrics())
    if own or state.replica is None or request.headers.get(replica_metrics.OWN_HEADER) == state.replica.token:
        return text
    return exposition([], await replica_metrics.collect(state.replica, text.decode()))


class Rendered(BaseModel):
    """One prompt as token ids, under vLLM's names. Routers use it to find the server that has the prefix cached."""

    request_id: str
    model: str
    token_ids: list[int] = Field(description="The prompt under the chat template, cut where the request says so.")


@router.post("/v1/chat/completions/render", responses=ERRORS, response_model=Rendered)
async def chat(body: schema.ChatRequest, request: Request) -> Response:
    """The token ids of the prompt that a chat completion with this body would use."""
    return await respond_from_thread(request, body, _only_prompt)


@router.post("/v1/completions/render", responses=ERRORS, response_model=list[Rendered])
async def completion(body: schema.CompletionRequest, request: Request) -> Response:
    """The token ids of the prompts that a completion with this body would use."""
    return await respond_from_thread(request, body, _prompts)


@router.post("/v1/responses/render", responses=ERRORS, response_model=Rendered)
async def response(body: ResponsesRequest, request: Request) -> Response:
    """The token ids of the prompt that a response (/v1/responses) with this body would use."""
    state, incoming = state_of(request), body_of(request)
    async with state.deadline(incoming):
        translated = await state.body_reader.pools.run(pool_of(incoming), chat_of, body)
    return await respond_from_thread(request, translated, _only_prompt)


def _prompts(served: ServedModel, body: schema.Common) -> list[dict[str, Any]]:
    return [
        {"request_id": f"render-{uuid.uuid4().hex}", "model": body.model or served.names[0], "token_ids": ids}
        for ids in prompt_ids(served.llm, served.formats, body)
    ]


def _only_prompt(served: ServedModel, body: schema.Common) -> dict[str, Any]:
    return _prompts(served, body)[0]
