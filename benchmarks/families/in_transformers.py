"""Small random models against transformers' classes, and their drafters against tests/contract/oracles.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from family_rows import row_of
from oracles import logits_of_oracle, oracle_of
from support import ALL_FAMILIES, make, prompt_of, request, run
from test_families import logits_in_chunks, test_draft_logits_of_a_growing_sequence_match_the_oracle
from test_v4_dspark import test_drafts_match_public_code
from tiny_models import write_model

from headstart.config import EngineConfig
from headstart.engine.load import Model, load_model
from headstart.models.base import Family

NOT_THERE = ("step5",)
"""Rows without a class in transformers."""
LENGTH, GREEDY = 90, 100
LIMIT = 2e-4
"""Maximum difference of a logit in float32."""


@dataclass(frozen=True)
class Found:
    """Maximum logit difference, and number of equal greedy tokens before the first difference: with transformers, and
    of `native` with `reference`."""

    logits: float
    greedy: int
    native: int


def loaded(folder: Path, backend: str) -> Model:
    more: dict[str, Any] = {"kv_cache_dtype": "float32"} if backend == "native" else {}
    return load_model(str(folder), EngineConfig(backend=backend, dtype="float32", threads=1, **more))


def compare(family: Family, name: str, folder: Path, changes: Mapping[str, Any]) -> Found:
    config, arrays = family.tiny(**changes)
    write_model(folder / name, config, arrays)
    model = loaded(folder / name, "reference")
    oracle = oracle_of(name, model)
    tokens = [token % model.config.vocab_size for token in prompt_of(LENGTH, 5)]
    expected = logits_of_oracle(oracle, tokens)
    found = logits_in_chunks(make(model, dtype="float32", drafter="none"), tokens, LENGTH, 1)
    prompt = [token % model.config.vocab_size for token in prompt_of(12, 8)]
    ours = _text(model, prompt, {})
    theirs = logits_of_oracle(oracle, [*prompt, *ours[:-1]])[len(prompt) - 1 :].argmax(-1).tolist()
    native = _text(
        loaded(folder / name, "native"), prompt,
        {"backend": "native", "block_size": 16, "kv_cache_dtype": "float32", "drafter": "auto"},
    )  # fmt: skip
    return Found(float((found - expected).abs().max()), same_until(ours, theirs), same_until(native, ours))


def _text(model: Model, prompt: list[int], more: dict[str, Any]) -> list[int]:
    """Greedy tokens, without drafts unless `more` enables them."""
    settings = {"dtype": "float32", "drafter": "none", "depth": 3, "max_model_len": 128, **more}
    outputs = run(make(model, **settings), [request(prompt, max_tokens=GREEDY, stops=())])
    return list(outputs["r", 0].tokens)


def same_until(left: list[int], right: list[int]) -> int:
    different = (i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)
    return next(different, len(left))


DSPARK = {"deepseek_v4_dspark": "deepseek_v4", "deepseek_v41": "deepseek_v41"}
"""Rows with a DSpark drafter -> their families."""


def has_drafter(row: str) -> bool:
    """Whether this row's drafter has a check. Of the variants only those in DSPARK have one."""
    return row in DSPARK or (row in ALL_FAMILIES and row_of(row).mtp is not None)


def check_drafter(row: str) -> None:
    """Checks draft logits at 20 lengths with three steps each, or of a block after contexts within and beyond the
    window. Raises AssertionError."""
    if family := DSPARK.get(row):
        for length, window in ((1, 64), (7, 64), (40, 64), (40, 11)):
            test_drafts_match_public_code("reference", "float64", length, window, family)
    else:
        test_draft_logits_of_a_growing_sequence_match_the_oracle(row)
