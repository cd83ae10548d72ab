"""The endpoints."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import headstart
from headstart.api import LLM
from headstart.errors import UsageError
from headstart.server import answers, fields, limits
from headstart.server.answering import ERRORS, State, answer, check_model, prepared, state_of
from headstart.server.bridge import Bridge
from headstart.server.chat_prompt import Chat
from headstart.server.documents import dumped
from headstart.server.errors import document
from headstart.server.intake import CheckedRoute
from headstart.server.prepare import chat_job, completion_job, encoded
from headstart.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

router = APIRouter(route_class=CheckedRoute)
RETRY = {"Retry-After": "1"}


@router.post("/v1/completions", responses=ERRORS, response_model=answers.TextCompletion)
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continue a text, or several."""
    return await answer(request, body, partial(completion_job, body=body))


@router.post("/v1/chat/completions", responses=ERRORS, response_model=answers.ChatCompletion)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    """The next turn of a conversation."""
    return await answer(request, body, partial(chat_job, formats=state_of(request).formats, body=body))


@router.get("/v1/models", response_model=answers.ModelList)
async def models(request: Request) -> dict[str, Any]:
    """What this server serves, for clients of OpenAI's API and of Anthropic's."""
    state = state_of(request)
    info = state.bridge.llm.info
    entry = {
        "object": "model", "created": state.started, "owned_by": "headstart", "root": info["model"],
        "max_model_len": info["context"], "type": "model", "max_input_tokens": info["context"],
        "created_at": datetime.fromtimestamp(state.started, UTC).isoformat(),
        **{key: info[key] for key in ("synthetic_acceptance",) if key in info},
    }  # fmt: skip
    data = [{"id": name, "display_name": name, **entry} for name in state.names]
    return {"object": "list", "data": data, "has_more": False, "first_id": state.names[0], "last_id": state.names[-1]}


@router.get("/v1/models/{name:path}", responses={404: ERRORS[404]}, response_model=answers.ModelEntry)
async def model(name: str, request: Request) -> dict[str, Any]:
    """One model."""
    check_model(state_of(request), name)
    entry: dict[str, Any] = next(each for each in (await models(request))["data"] if each["id"] == name)
    return entry


@router.post("/tokenize", responses=ERRORS, response_model=answers.Tokenized)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Token ids of a text or of messages under the chat template."""
    state = state_of(request)
    headers = fields.header(fields.check(body.model_extra))
    check_model(state, body.model)
    return await prepared(request, partial(_tokenized, state, body), headers)


def _tokenized(state: State, body: TokenizeRequest) -> bytes:
    if (body.prompt is None) == (body.messages is None):
        raise UsageError("tokenize needs exactly one of prompt and messages")
    llm = state.bridge.llm
    if body.prompt is not None:
        ids = encoded(llm, body.prompt, body.add_special_tokens)
    else:
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        ids = Chat.of(body, tools, state.formats.parse_special).encoded(llm)[0]
    document: dict[str, Any] = {"count": len(ids), "max_model_len": llm.engine.max_length, "tokens": ids}
    if body.return_token_strs:
        document["token_strs"] = [llm.tokenizer.token_text(token) for token in ids]
    return dumped(document).encode()


@router.post("/detokenize", responses=ERRORS, response_model=answers.Detokenized)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids."""
    state = state_of(request)
    headers = fields.header(fields.check(body.model_extra))
    check_model(state, body.model)
    return await prepared(request, partial(_detokenized, state.bridge.llm, body.tokens), headers)


def _detokenized(llm: LLM, tokens: list[int]) -> bytes:
    size = llm.model.config.vocab_size
    if wrong := [token for token in tokens if not 0 <= token < size]:
        raise UsageError(f"token id {limits.shortened(str(wrong[0]))} is outside 0..{size - 1}")
    return dumped({"prompt": llm.tokenizer.decode(tokens)}).encode()


@router.get("/health", responses={503: {"description": "The engine fails, or the server is shutting down."}})
async def health(request: Request) -> Response:
    """200 while requests are answered."""
    why = _why_not(state_of(request).bridge)
    return JSONResponse(document(why, 503), 503, RETRY) if why else JSONResponse({"status": "ok"})


@router.get("/ping")
@router.post("/ping")
async def ping(request: Request) -> Response:
    """As /health, under the name that some platforms ask for."""
    return await health(request)


@router.get("/ready", responses={503: {"description": "The next request would be refused."}})
async def ready(request: Request) -> Response:
    """200 while there is room for another request."""
    bridge = state_of(request).bridge
    why = _why_not(bridge) or ("too many requests run or wait" if bridge.is_full else "")
    return JSONResponse(document(why, 503), 503, RETRY) if why else JSONResponse({"status": "ok"})


def _why_not(bridge: Bridge) -> str:
    if not bridge.alive:
        return "the engine's thread has ended; see the server's log"
    if bridge.failures > 1:
        return f"{bridge.failures} steps in a row have failed; see the server's log"
    return "the server is shutting down" if bridge.draining else ""


@router.get("/version")
async def version() -> dict[str, str]:
    """Of headstart."""
    return {"version": headstart.__version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus, under vLLM's names."""
    text = generate_latest(state_of(request).bridge.watch.registry)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
