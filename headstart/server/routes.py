"""The endpoints."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

import headstart
from headstart.errors import UsageError
from headstart.server import answers, fields, limits
from headstart.server.answering import ERRORS, answer, chatting, completing, prepared, state_of
from headstart.server.bridge import Bridge
from headstart.server.chat_prompt import Chat
from headstart.server.documents import dumped
from headstart.server.entries import Entry, Served, context_of
from headstart.server.errors import document
from headstart.server.intake import CheckedRoute
from headstart.server.prepare import encoded
from headstart.server.replicas import siblings
from headstart.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from headstart.server.shelf import Shelf
from headstart.server.watch import exposition

router = APIRouter(route_class=CheckedRoute)
RETRY = {"Retry-After": "1"}


@router.post("/v1/completions", responses=ERRORS, response_model=answers.TextCompletion)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a text, or several."""
    return await answer(request, body, completing(body))


@router.post("/v1/chat/completions", responses=ERRORS, response_model=answers.ChatCompletion)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """The next turn of a conversation."""
    return await answer(request, body, chatting(body))


@router.get("/v1/models", response_model=answers.ModelList)
async def models(request: Request) -> dict[str, Any]:
    """What this server serves, for clients of OpenAI's API and of Anthropic's."""
    state = state_of(request)
    data = [each for entry in state.shelf.entries for each in await _listed(state.shelf, entry, state.started)]
    return {"object": "list", "data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}


async def _listed(shelf: Shelf, entry: Entry, started: int) -> list[dict[str, Any]]:
    """A model under each of its names. `loaded`: is it in memory? Only where models come and go."""
    info = entry.served.llm.info if entry.served else {}
    context = info["context"] if info else await run_sync(context_of, entry)
    document = {
        "object": "model", "created": started, "owned_by": "headstart", "root": info.get("model") or entry.root,
        "max_model_len": context, "type": "model", "max_input_tokens": context,
        "created_at": datetime.fromtimestamp(started, UTC).isoformat(),
        **{key: info[key] for key in ("synthetic_acceptance",) if key in info},
        **({} if shelf.stays else {"loaded": entry.served is not None}),
    }  # fmt: skip
    return [{"id": name, "display_name": name, **document} for name in entry.offer.names]


@router.get("/v1/models/{name:path}", responses={404: ERRORS[404]}, response_model=answers.ModelEntry)
async def model(name: str, request: Request) -> dict[str, Any]:
    """One model."""
    state = state_of(request)
    entry = state.shelf.find(name)
    listed = await _listed(state.shelf, entry, state.started)
    return next((each for each in listed if each["id"] == name), listed[0])


@router.post("/tokenize", responses=ERRORS, response_model=answers.Tokenized)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text or of messages under the chat template."""
    headers = fields.header(fields.check(body.model_extra))
    return await prepared(request, body.model, lambda served: _tokenized(served, body), headers)


def _tokenized(served: Served, body: TokenizeRequest) -> bytes:
    if (body.prompt is None) == (body.messages is None):
        raise UsageError("tokenize needs exactly one of prompt and messages")
    llm = served.llm
    if body.prompt is not None:
        ids = encoded(llm, body.prompt, body.add_special_tokens)
    else:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        ids = Chat.of(body, tools, served.formats.parse_special).encoded(llm)[0]
    document: dict[str, Any] = {"count": len(ids), "max_model_len": llm.engine.max_length, "tokens": ids}
    if body.return_token_strs:
        document["token_strs"] = [llm.tokenizer.token_text(token) for token in ids]
    return dumped(document).encode()


@router.post("/detokenize", responses=ERRORS, response_model=answers.Detokenized)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids."""
    headers = fields.header(fields.check(body.model_extra))
    return await prepared(request, body.model, lambda served: _detokenized(served, body.tokens), headers)


def _detokenized(served: Served, tokens: list[int]) -> bytes:
    llm = served.llm
    size = llm.model.config.vocab_size
    if wrong := [token for token in tokens if not 0 <= token < size]:
        raise UsageError(f"token id {limits.shortened(str(wrong[0]))} is outside 0..{size - 1}")
    return dumped({"prompt": llm.tokenizer.decode(tokens)}).encode()


@router.get("/health", responses={503: {"description": "The engine fails, or the server is shutting down."}})
async def health(request: Request) -> Response:
    """200 while requests are answered."""
    why = _why_not(state_of(request).shelf)
    return JSONResponse(document(why, 503), 503, RETRY) if why else JSONResponse({"status": "ok"})


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """As /health, under the name that some platforms ask for."""
    return await health(request)


@router.get("/ready", responses={503: {"description": "The next request would be refused."}})
async def ready(request: Request) -> Response:
    """200 while there is room for another request."""
    shelf = state_of(request).shelf
    full = bool(shelf.loaded) and all(each.bridge.is_full for each in shelf.loaded)
    why = _why_not(shelf) or ("too many requests run or wait" if full else "")
    return JSONResponse(document(why, 503), 503, RETRY) if why else JSONResponse({"status": "ok"})


def _why_not(shelf: Shelf) -> str:
    """Of several models one that works is enough; those that are not in memory are loaded when they are asked for."""
    if shelf.draining:
        return "the server is shutting down"
    found = [_fault(each.bridge) for each in shelf.loaded]
    return found[0] if found and all(found) else ""


def _fault(bridge: Bridge) -> str:
    if not bridge.alive:
        return "the engine's thread has ended; see the server's log"
    if bridge.failures > 1:
        return f"{bridge.failures} steps in a row have failed; see the server's log"
    return ""


@router.get("/version")
async def version() -> dict[str, str]:
    """Of headstart."""
    return {"version": headstart.__version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus, under vLLM's names; of replicas behind one router those of all."""
    return Response(await exposed(request), media_type=CONTENT_TYPE_LATEST)


@router.get("/replicas")
async def replicas(request: Request) -> dict[str, Any]:
    """The replicas behind the router of this server; none where there is but this process."""
    member = state_of(request).member
    found = []
    if member is not None:
        found = await siblings.listed(member, (await exposed(request, own=True)).decode())
    return {"replicas": found}


async def exposed(request: Request, *, own: bool = False) -> bytes:
    """Metrics, of this process alone where they are asked for so."""
    state = state_of(request)
    text = exposition([each.bridge.watch for each in state.shelf.loaded], state.shelf.metrics())
    if own or state.member is None or request.headers.get(siblings.OWN) == state.member.token:
        return text
    return exposition([], await siblings.metrics(state.member, text.decode()))
