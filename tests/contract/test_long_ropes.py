"""Ropes whose frequencies transformers chooses by text length: headstart chooses them by the configured context, so
that a text does not depend on chunks. Logits beyond the original context match transformers."""

from typing import Any

import pytest
from oracles import logits_of_oracle, oracle_of
from support import family_of, make, model_at, new_folder, prompt_of
from test_families import assert_logits
from tiny_models import write_model

from headstart.engine.load import Model
from headstart.errors import UsageError
from headstart.layers.rope import CONTEXT, max_rope_length, rope_spec

LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.3, 1.6, 2.0], "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG: dict[str, dict[str, Any]] = {
    "longrope": {"rope_scaling": LONGROPE, "max_position_embeddings": 256},
    "longrope, given scale": {"rope_scaling": {**LONGROPE, "attention_factor": 1.1}, "max_position_embeddings": 256},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64},
}
SHORT_LENGTH, LONG_LENGTH = 60, 90


def loaded(variant: str, context: int | None) -> Model:
    config, arrays = family_of("llama").tiny(head_dim=8, **LONG[variant])
    return model_at(write_model(new_folder(), config, arrays), max_model_len=context)


@pytest.mark.parametrize("variant", LONG)
@pytest.mark.parametrize(("context", "length"), [(None, SHORT_LENGTH), (LONG_LENGTH, LONG_LENGTH)])
def test_logits_match_transformers(variant: str, context: int | None, length: int) -> None:
    model, tokens = loaded(variant, context), prompt_of(length, 5)
    assert model.config.max_length == {None: 64}.get(context, 90 if variant == "dynamic" else 256)
    expected = logits_of_oracle(oracle_of("llama", model), tokens)
    assert_logits(model, tokens, expected, (length, 1), (7, 7), max_model_len=length)


@pytest.mark.parametrize("variant", LONG)
def test_longer_context_requires_max_model_len(variant: str) -> None:
    with pytest.raises(UsageError, match="the model's context is 64"):
        make(loaded(variant, None), dtype="float32", drafter="none", max_model_len=65)
    make(loaded(variant, 65), dtype="float32", drafter="none", max_model_len=65)


def test_frequencies_follow_the_context() -> None:
    config = {"rope_theta": 1e4, **LONG["longrope"]}
    short, long = rope_spec(config, 8), rope_spec(config | {CONTEXT: 65}, 8)
    ratio = [a / b for a, b in zip(short.inv_freq, long.inv_freq, strict=True)]
    assert ratio == pytest.approx([2.0, 3.0 / 1.3, 4.0 / 1.6, 2.5]) and short == rope_spec(config | {CONTEXT: 64}, 8)
    dynamic = {"rope_theta": 1e4, **LONG["dynamic"]}
    assert rope_spec(dynamic, 8) == rope_spec(dynamic | {CONTEXT: 64}, 8) != rope_spec(dynamic | {CONTEXT: 65}, 8)
    assert [max_rope_length(dynamic | {CONTEXT: context}, 64) for context in (None, 32, 100, 1000)] == [
        64,
        64,
        100,
        256,
    ]
