"""Small random models on `cuda` against `reference`; in Triton's interpreter without a GPU."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if not Path("/dev/nvidia0").exists():  # Triton reads it at its first import
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path[:0] = [str(Path(__file__).parents[2] / "tests")]
from support import Outputs, make, prompt_of, request, run  # noqa: E402

from headstart.config import EngineConfig  # noqa: E402
from headstart.engine.load import load_model  # noqa: E402

LENGTHS, TOKENS, DEPTH = (11, 4), 3, 3
"""Lengths of prompts, tokens of each answer, draft depth."""
CHUNK = 9
LIMIT = 2e-4
"""Maximum difference of a log-probability in float32."""


@dataclass(frozen=True)
class Found:
    """`difference`: maximum difference of a log-probability from `reference`, over all tokens of prompts and answers.
    `same`: whether the answers are equal. `exact`: whether tokens and log-probabilities with drafts (`accepted` of
    them), in chunks and in batches equal plain decoding bit for bit."""

    difference: float
    same: bool
    exact: bool
    accepted: int

    @property
    def good(self) -> bool:
        return self.difference <= LIMIT and self.same and self.exact


def compare(folder: Path, vocab: int, *, drafts: str) -> Found:
    """Compares a model that drafts with its MTP modules or by prompt lookup."""
    prompts = [[3 + token % (vocab - 3) for token in prompt_of(length, length)] for length in LENGTHS]
    prompts[0][8:] = prompts[0][3:8]  # a repetition for prompt lookup
    plain = {"drafter": "none", "max_num_seqs": 1, "enable_prefix_caching": False}
    drafting = {"drafter": drafts or "ngram", "depth": DEPTH, "max_num_batched_tokens": CHUNK}
    theirs, _ = texts(folder, "reference", prompts, plain)
    ours, _ = texts(folder, "cuda", prompts, plain)
    drafted, accepted = texts(folder, "cuda", prompts, drafting)
    differences = [abs(a - b) for a, b in zip(numbers(theirs), numbers(ours), strict=True)]
    return Found(
        difference=max(differences),
        same=[each.tokens for each in theirs.values()] == [each.tokens for each in ours.values()],
        exact=(numbers(ours), tokens(ours)) == (numbers(drafted), tokens(drafted)),
        accepted=accepted,
    )


def texts(folder: Path, backend: str, prompts: list[list[int]], settings: dict[str, Any]) -> tuple[Outputs, int]:
    """Greedy outputs of the engine, and the number of accepted tokens."""
    kept: dict[str, Any] = {"kv_cache_dtype": "float32"} if backend == "cuda" else {}
    asked = {"backend": backend, "dtype": "float32", **kept, **settings}
    engine = make(load_model(str(folder), EngineConfig(backend=backend, dtype="float32", threads=1, **kept)), **asked)
    about: dict[str, Any] = {"max_tokens": TOKENS, "stops": (), "logprobs": 0, "prompt_logprobs": 0}
    found = run(engine, [request(prompt, name=str(i), **about) for i, prompt in enumerate(prompts)])
    return dict(sorted(found.items())), engine.stats.accepted


def numbers(outputs: Outputs) -> list[float]:
    """All log-probabilities of the outputs."""
    return [
        known.logprob for each in outputs.values() for known in (*each.prompt_logprobs, *each.logprobs) if known
    ]  # fmt: skip


def tokens(outputs: Outputs) -> list[list[int]]:
    return [each.tokens for each in outputs.values()]
