"""Embeddings of texts: OpenAI's /v1/embeddings, Ollama's /api/embed and /api/embeddings.

An embedding is the mean of the trunk's hidden states after the final norm over all tokens of a text, normalized to
length 1. The trunk was trained to continue texts, not to compare them, so embeddings only suit clustering and rough
search.
"""

import base64
import time
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field, StrictInt, StrictStr

from headstart.api import LLM
from headstart.core import Float32, Request as EngineRequest, SamplingParams
from headstart.errors import ParameterError, UsageError
from headstart.server import pipeline
from headstart.server.accounts import Account
from headstart.server.apis.ollama import (
    ERRORS as OLLAMA_ERRORS,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    keep_alive_of,
)
from headstart.server.body_reader import CheckedRoute, cancel_on_disconnect, pool_of
from headstart.server.model_manager import ServedModel
from headstart.server.prepare import adapter_of, encode_text, list_of_texts, with_owner
from headstart.server.renderer import dump_json
from headstart.server.schema import Body, ResponseModel, Texts, ignored_fields_header

router = APIRouter(route_class=CheckedRoute)
POOLING = "mean"
MAX_IN_ENGINE = 16  # texts of one request in the engine at a time, so that other requests find queue places
Text = str | list[int]


class EmbeddingRequest(Body):
    """POST /v1/embeddings."""

    model: StrictStr | None = None
    input: Texts
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: StrictInt | None = Field(default=None, description="Must be the model's hidden size if given.")
    user: StrictStr | None = None


EmbeddingBody = EmbeddingRequest | OllamaEmbedRequest | OllamaEmbeddingRequest


class Embedding(ResponseModel):
    """Embedding of one text: a list of numbers, or base64 of little-endian float32 bytes."""

    object: Literal["embedding"]
    index: int = Field(ge=0)
    embedding: list[float] | str


class EmbeddingList(ResponseModel):
    """Response of /v1/embeddings. `pooling`: how the hidden states of all tokens are combined."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    pooling: Literal["mean"]
    usage: dict[str, int]


class OllamaEmbeddings(ResponseModel):
    """Response of /api/embed."""

    model: str
    embeddings: list[list[float]]
    pooling: Literal["mean"]
    prompt_eval_count: int = Field(ge=0)


@router.post("/v1/embeddings", responses=pipeline.ERRORS, response_model=EmbeddingList)
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    """A vector for each text: the mean of its tokens' hidden states, of length 1."""
    headers = ignored_fields_header(body)
    served = await pipeline.find_model(request, body.model)
    vectors, count = await _embed(request, served, body, body.input, cut=False)
    shown = [_base64(each) if body.encoding_format == "base64" else each.tolist() for each in vectors]
    document = {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": each} for i, each in enumerate(shown)],
        "model": body.model or served.names[0],
        "pooling": POOLING,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }
    data = await pipeline.state_of(request).body_reader.pools.run("answer", dump_json, document)
    return Response(data, media_type="application/json", headers=headers)


@router.post("/api/embed", responses=OLLAMA_ERRORS, response_model=OllamaEmbeddings)
async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
    """Embeddings in Ollama's shape. Texts that are too long are truncated, unless `truncate` is false."""
    begun, headers = time.perf_counter(), ignored_fields_header(body)
    served = await pipeline.find_model(request, body.model, keep_alive_of(body))
    vectors, count = await _embed(request, served, body, body.input, cut=body.truncate is not False)
    document = {
        "model": body.model, "embeddings": [each.tolist() for each in vectors], "pooling": POOLING,
        "total_duration": round((time.perf_counter() - begun) * 1e9), "load_duration": 0, "prompt_eval_count": count,
    }  # fmt: skip
    data = await pipeline.state_of(request).body_reader.pools.run("answer", dump_json, document)
    return Response(data, media_type="application/json", headers=headers)


@router.post("/api/embeddings", responses=OLLAMA_ERRORS)
async def embedding(body: OllamaEmbeddingRequest, request: Request) -> Response:
    """The embedding of one text; Ollama's older endpoint."""
    headers = ignored_fields_header(body)
    served = await pipeline.find_model(request, body.model, keep_alive_of(body))
    (vector,), _ = await _embed(request, served, body, body.prompt, cut=True)
    return JSONResponse({"embedding": vector.tolist()}, headers=headers)


async def _embed(
    request: Request, served: ServedModel, body: EmbeddingBody, given: str | list[Any], *, cut: bool
) -> tuple[list[Float32], int]:
    """Vectors of the texts and the number of their tokens. `cut`: truncate texts that are too long. Raises UsageError,
    CapacityError and ClientGone."""
    size, dimensions = served.llm.model.config.hidden_size, getattr(body, "dimensions", None)
    if dimensions not in (None, size):
        raise ParameterError("dimensions", f"is {dimensions}, but embeddings of this model have {size}", "leave it out")
    state, incoming, account = pipeline.state_of(request), pipeline.body_of(request), pipeline.account_of(request)

    async def work() -> tuple[list[Float32], int]:
        pools, texts = state.body_reader.pools, list_of_texts(given, "input")
        requests = await pools.run(pool_of(incoming), _requests, served.llm, texts, cut, account, body.model)
        incoming.release()
        vectors: list[Float32] = []
        for start in range(0, len(requests), MAX_IN_ENGINE):
            vectors += await _compute(served, requests[start : start + MAX_IN_ENGINE])
        return vectors, sum(len(each.prompt_ids) for each in requests)

    with served.admission.hold():
        async with state.deadline(incoming):
            return await cancel_on_disconnect(request.receive, work())


def _requests(llm: LLM, texts: Seq[Text], cut: bool, account: Account, model: str | None) -> list[EngineRequest]:
    """An engine request for each text. It ends after its prompt, without output tokens."""
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    requests, lora = [], adapter_of(llm, model)
    for text in texts:
        if text in ("", []):
            raise UsageError("a text is empty", "give at least one character")
        if cut and isinstance(text, str) and not llm.tokenizer.may_fit(text, llm.engine.max_length):
            text = text[: llm.engine.max_length * llm.tokenizer.max_token_bytes]
        ids = encode_text(llm, text, True) if isinstance(text, str) else text
        request = llm.request(ids[: llm.engine.max_length - 1] if cut else ids, params, depth=0, lora=lora)
        requests.append(with_owner(replace(request, embeds=True), account))
    return requests


async def _compute(served: ServedModel, requests: Seq[EngineRequest]) -> list[Float32]:
    vectors: dict[int, Float32] = {}
    stream = await served.open(requests)
    try:
        async for number, delta in stream:
            if delta.embedding is not None:
                length = np.linalg.norm(delta.embedding)
                vectors[number] = (delta.embedding / length if length else delta.embedding).astype(np.float32)
                served.metrics.prompt_tokens += len(requests[number].prompt_ids)
    finally:
        stream.close()
    return [vectors[number] for number in range(len(requests))]


def _base64(vector: Float32) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
