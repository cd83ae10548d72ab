"""Embeddings of texts: OpenAI's /v1/embeddings, Ollama's /api/embed and /api/embeddings.

An embedding is the mean of the trunk's hidden states behind the final norm over all tokens of the text, at length 1.
The trunk was trained to go on with texts, not to compare them: good for clusters and rough search.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from numpy.typing import NDArray
from pydantic import Field, StrictInt, StrictStr

from headstart.api import LLM
from headstart.core import Request as EngineRequest, SamplingParams
from headstart.errors import UsageError
from headstart.server import fields
from headstart.server.accounts import Account
from headstart.server.answering import CLIENT_GONE, ERRORS, incoming_of, served_by, state_of, unless_gone
from headstart.server.answers import Answer
from headstart.server.apis.ollama import ERRORS as OLLAMA_ERRORS
from headstart.server.apis.ollama_body import OllamaEmbeddingRequest, OllamaEmbedRequest, keep_of
from headstart.server.bridge import Bridge
from headstart.server.documents import dumped
from headstart.server.entries import Served
from headstart.server.guards import OWNER
from headstart.server.intake import CheckedRoute, lane_of
from headstart.server.prepare import encoded, owned
from headstart.server.schema import Body, Texts

router = APIRouter(route_class=CheckedRoute)
POOLING = "mean"
AT_ONCE = 16
"""Texts of one request in the engine: who embeds a thousand leaves room for others."""
Text = str | list[int]
Vectors = NDArray[np.float32]


class EmbeddingRequest(Body):
    """POST /v1/embeddings."""

    model: StrictStr | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: StrictInt | None = Field(default=None, description="No other than the model's.")
    user: StrictStr | None = None


class Embedding(Answer):
    """Of one text: numbers, or the base64 of their float32 bytes."""

    object: Literal["embedding"]
    index: int = Field(ge=0)
    embedding: list[float] | str


class EmbeddingList(Answer):
    """Of /v1/embeddings. `pooling`: what became of the hidden states of all tokens."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    pooling: Literal["mean"]
    usage: dict[str, int]


class OllamaEmbeddings(Answer):
    """Of /api/embed."""

    model: str
    embeddings: list[list[float]]
    pooling: Literal["mean"]
    prompt_eval_count: int = Field(ge=0)


@router.post("/v1/embeddings", responses=ERRORS, response_model=EmbeddingList)
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """A vector for each text: the mean of its tokens' hidden states, of length 1."""
    state = state_of(request)
    headers = fields.header(fields.check(body.model_extra))
    served = await served_by(request, body.model)
    if served is None or (found := await _embedded(request, served, body.input, body.dimensions, cut=False)) is None:
        return Response(status_code=CLIENT_GONE)
    vectors, count = found
    shown: Callable[[Vectors], Any] = _base64 if body.encoding_format == "base64" else _floats
    document = {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": shown(each)} for i, each in enumerate(vectors)],
        "model": body.model or served.names[0],
        "pooling": POOLING,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
    data = await state.intake.lanes.run("answer", dumped, document)
    return Response(data, media_type="application/json", headers=headers)


@router.post("/api/embed", responses=OLLAMA_ERRORS, response_model=OllamaEmbeddings)
async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
    """The same in Ollama's words; texts that are too long are cut, unless `truncate` is false."""
    begun, state = time.perf_counter(), state_of(request)
    served, cut = await served_by(request, body.model, keep_of(body)), body.truncate is not False
    if served is None or (found := await _embedded(request, served, body.input, body.dimensions, cut=cut)) is None:
        return Response(status_code=CLIENT_GONE)
    document = {
        "model": body.model,
        "embeddings": [_floats(each) for each in found[0]],
        "pooling": POOLING,
        "total_duration": round((time.perf_counter() - begun) * 1e9),
        "load_duration": 0,
        "prompt_eval_count": found[1],
    }
    data = await state.intake.lanes.run("answer", dumped, document)
    return Response(data, media_type="application/json")


@router.post("/api/embeddings", responses=OLLAMA_ERRORS)
async def embedding(body: OllamaEmbeddingRequest, request: Request) -> Response:
    """Of one text; Ollama's older way."""
    served = await served_by(request, body.model, keep_of(body))
    if served is None or (found := await _embedded(request, served, body.prompt, None, cut=True)) is None:
        return Response(status_code=CLIENT_GONE)
    return JSONResponse({"embedding": _floats(found[0][0])})


def _check_dimensions(llm: LLM, wanted: int | None) -> None:
    size = llm.model.config.hidden_size
    if wanted not in (None, size):
        raise UsageError(f"dimensions is {wanted}, but embeddings of this model have {size}", "leave it out")


def _texts(given: str | list[Any]) -> list[Text]:
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    if not given:
        raise UsageError("input is an empty list", "give at least one text")
    return list(given)


async def _embedded(
    request: Request, served: Served, given: str | list[Any], dimensions: int | None, *, cut: bool
) -> tuple[list[Vectors], int] | None:
    """Vectors of texts, and the number of their tokens; None where the client has gone. `cut`: of those that are too
    long only the beginning is read."""
    _check_dimensions(served.llm, dimensions)
    state, incoming = state_of(request), incoming_of(request)
    account = state.shelf.accounts.named(request.scope.get(OWNER, ""))

    async def work() -> tuple[list[Vectors], int]:
        requests = await state.intake.lanes.run(lane_of(incoming), _requests, served.llm, _texts(given), cut, account)
        incoming.release()
        vectors: list[Vectors] = []
        for start in range(0, len(requests), AT_ONCE):
            vectors += await _through_engine(served.bridge, requests[start : start + AT_ONCE])
        return vectors, sum(len(each.prompt_ids) for each in requests)

    with served.bridge.held():
        async with state.deadline(incoming):
            return await unless_gone(request, work())


def _requests(llm: LLM, texts: Seq[Text], cut: bool, account: Account) -> list[EngineRequest]:
    """One for each text, that ends with the prompt."""
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    requests = []
    for text in texts:
        if text in ("", []):
            raise UsageError("a text is empty", "give at least one character")
        if cut and isinstance(text, str):
            text = text[: llm.engine.max_length * llm.tokenizer.longest]
        ids = encoded(llm, text, True) if isinstance(text, str) else text
        request = llm.request(ids[: llm.engine.max_length - 1] if cut else ids, params, depth=0)
        requests.append(owned(replace(request, embeds=True), account))
    return requests


async def _through_engine(bridge: Bridge, requests: Seq[EngineRequest]) -> list[Vectors]:
    vectors: dict[int, Vectors] = {}
    stream = await bridge.open(requests)
    try:
        async for number, delta in stream:
            if delta.embedding is not None:
                length = np.linalg.norm(delta.embedding)
                vectors[number] = (delta.embedding / length if length else delta.embedding).astype(np.float32)
                bridge.watch.prompt_tokens += len(requests[number].prompt_ids)
    finally:
        stream.close()
    return [vectors[number] for number in range(len(requests))]


def _floats(vector: Vectors) -> list[float]:
    return [float(value) for value in vector]


def _base64(vector: Vectors) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
