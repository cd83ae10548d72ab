"""Embeddings through the official clients."""

import base64
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from process import MODEL, Server

pytestmark = pytest.mark.slow  # a server process
TEXTS = ["The cat sat on the mat.", "Prices rose by two per cent.", "A kitten lay on the rug."]


def test_float_and_base64_encodings_are_the_same_vectors(openai_client: OpenAI, server: Server) -> None:
    found = openai_client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    vectors = np.array([each.embedding for each in found.data], np.float32)
    assert found.model_extra == {"pooling": "mean"}
    assert [each.index for each in found.data] == [0, 1, 2]
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    similar = vectors @ vectors.T
    assert similar[0, 2] > max(similar[0, 1], similar[1, 2])
    coded = server.post("/v1/embeddings", input=TEXTS[0], encoding_format="base64").json()
    assert np.array_equal(np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), "<f4"), vectors[0])
    ids = [server.post("/tokenize", prompt=text).json()["tokens"] for text in TEXTS]
    assert found.usage.prompt_tokens == sum(map(len, ids))
    again = openai_client.embeddings.create(model=MODEL, input=ids[::-1])  # by default the client asks for base64
    assert np.array_equal(np.array([each.embedding for each in again.data], np.float32), vectors[::-1])
    web = server.post("/api/embed", model=f"{MODEL}:latest", input=TEXTS).json()
    assert np.array_equal(np.array(web["embeddings"], np.float32), vectors)
    assert web["prompt_eval_count"] == found.usage.prompt_tokens
    old = server.post("/api/embeddings", model=MODEL, prompt=TEXTS[0]).json()["embedding"]
    assert np.array_equal(np.array(old, np.float32), vectors[0])


@pytest.mark.parametrize(("asked", "says"), [
    ({"dimensions": 8}, "have 576"), ({"input": []}, "empty"), ({"input": ["x", ""]}, "empty"),
    ({"input": [10**9]}, "outside"), ({"input": 5}, "input"), ({"input": "x " * 20_000}, "context"),
    ({"encoding_format": "int8"}, "encoding_format"),
])  # fmt: skip
def test_invalid_requests_name_the_problem(openai_client: OpenAI, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequestError, match=says):
        openai_client.embeddings.create(**{"model": MODEL, "input": "x"} | asked)


def test_ollama_embed_refuses_long_texts_with_truncate_false(server: Server) -> None:
    long = {"model": MODEL, "input": "x " * 20_000}
    refused = server.post("/api/embed", **long, truncate=False)
    assert refused.status_code == 400
    assert "context" in refused.json()["error"]
