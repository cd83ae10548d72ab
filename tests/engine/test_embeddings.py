"""Embeddings of prompts: equal to the mean of transformers' hidden states, with bits independent of the batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModel

from headstart import hub
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import Delta, SamplingParams

NAME = next(name for name in hub.builtin_names() if name not in hub.BUILTIN)
TEXTS = ["def read(self):\n    return self.value\n" * 4, "import os\n", "def read(self):\n    return self.value\n" * 4]


def embed(llm: LLM, texts: list[str], *, beside: int = 0) -> dict[int, np.ndarray]:
    """Embeddings by index in `texts`; `beside` other requests generate in the same batch."""
    numbers, found = {}, {}
    for number, text in enumerate(texts):
        request = llm.request(text, SamplingParams(max_tokens=1, temperature=0.0), raw=True, depth=0)
        llm.engine.submit(replace(request, embeds=True))
        numbers[request.request_id] = number
    for number in range(beside):
        llm.engine.submit(llm.request(f"class A{number}:", SamplingParams(max_tokens=12, seed=number), raw=True))

    def deliver(deltas: list[Delta]) -> None:
        for delta in deltas:
            if delta.embedding is not None:
                found[numbers[delta.request_id]] = delta.embedding

    while llm.engine.has_work:
        llm.engine.step(deliver)
    return found


@pytest.fixture(scope="module")
def separate() -> list[np.ndarray]:
    llm = LLM(NAME, EngineConfig(max_model_len=256, threads=1))
    return [embed(llm, [text])[0] for text in TEXTS]


@pytest.mark.slow
def test_embedding_matches_the_mean_of_transformers(separate: list[np.ndarray]) -> None:
    llm = LLM(NAME, EngineConfig(max_model_len=256, backend="reference", dtype="float32"))
    model = AutoModel.from_pretrained(hub.resolve(NAME), dtype=torch.float32)
    for text, native, reference in zip(TEXTS, separate, embed(llm, TEXTS).values(), strict=True):
        ids = torch.tensor([llm.encode(text, raw=True)])
        with torch.inference_mode():
            expected = model(ids).last_hidden_state[0].double().mean(0).numpy()
        np.testing.assert_allclose(reference, expected, atol=1e-4 * np.abs(expected).max())
        assert native @ expected > 0.999 * np.linalg.norm(native) * np.linalg.norm(expected)


def test_bits_are_independent_of_batch_chunks_and_prefix_cache(separate: list[np.ndarray]) -> None:
    llm = LLM(NAME, EngineConfig(max_model_len=256, threads=1, max_num_batched_tokens=24, max_num_seqs=4))
    for _ in range(2):  # in the second turn the prefixes are cached
        found = embed(llm, TEXTS, beside=3)
        assert all(np.array_equal(found[number], vector) for number, vector in enumerate(separate))
