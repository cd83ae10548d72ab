"""Every family of the registry compared with an independent implementation, on tiny random models.

Trunks: transformers, in float32. Native MTP modules: a plain torch implementation of the published formula, in float64.
A new family that transformers knows needs no change here; other families have a row in family_rows.py."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from family_rows import ROWS, row_of
from oracles import assert_greedy_text, logits_of_oracle, mtp_oracle, oracle_of
from support import ALL_FAMILIES, FAMILIES, VOCAB, family_of, make, new_sequence, prompt_of, request, run, tiny_model
from torch import Tensor

from headstart.core import Sampled, Span
from headstart.drafters.base import DraftRequest
from headstart.engine.engine import Engine
from headstart.engine.load import Model
from headstart.errors import ModelError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "as many kv heads": {"num_key_value_heads": 6},
    "one kv head": {"num_key_value_heads": 1},
    "wide odd heads": {"head_dim": 22, "num_attention_heads": 3, "num_key_value_heads": 1},
    "biases": {"attention_bias": True},
    "one layer, odd sizes": {"num_hidden_layers": 1, "intermediate_size": 37, "vocab_size": 97},
    "large epsilon": {"rms_norm_eps": 0.05},
    "gelu": {"hidden_act": "gelu"},
    "gelu, tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "gelu, tanh, older name": {"hidden_act": "gelu_new"},
    "relu": {"hidden_act": "relu"},
    "squared relu": {"hidden_act": "relu2"},
    "rope linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "rope linear, older key": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "rope llama3": {"rope_scaling": LLAMA3},
    "rope yarn": {"rope_scaling": YARN},
    "rope yarn, own scale, not rounded": {"rope_scaling": {**YARN, "attention_factor": 1.3, "truncate": False}},
    "rope yarn, betas": {"rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0}},
    "rope yarn, mscale": {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "rope parameters of transformers 5": {"rope_parameters": {**LLAMA3, "rope_theta": 5000.0}, "rope_theta": None},
}
OF_KIND: dict[str, dict[str, Any]] = {
    "rope linear, older key": {},  # transformers 5.23 does not support the older key and `truncate` here
    "rope yarn, own scale, not rounded": {"rope_scaling": {**YARN, "attention_factor": 1.3}},
    "rope parameters of transformers 5": {
        "rope_parameters": {
            "full_attention": {**LLAMA3, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        }
    },
}
"""Variants of families whose kinds of layers have a rope each."""
ONCE = [name for name in VARIANTS if name.startswith(("gelu, ", "relu", "squared", "rope ")) and name != "rope yarn"]


def changes_of(family: str, variant: str) -> dict[str, Any]:
    row = row_of(family)
    changes = {**VARIANTS, **(OF_KIND if row.has_rope_by_kind else {}), **row.variants}[variant]
    return changes | ({"mlp_bias": True} if (family, variant) == ("llama", "biases") else {})


def changes_the_config(family: str, variant: str) -> bool:
    """Whether the variant is the unchanged family or a config that differs from it."""
    tiny, changes = family_of(family).tiny_config(), changes_of(family, variant)
    return variant == "as it is" or any(tiny.get(key, key) != value for key, value in changes.items())


CASES = [
    (family, variant)
    for family in FAMILIES
    for variant in {**VARIANTS, **row_of(family).variants}
    if (row_of(family).is_whole or variant not in ONCE)
    and not {variant, *VARIANTS.get(variant, {})} & {*row_of(family).excluded}
    and changes_the_config(family, variant)
]
LENGTH = 90  # beyond the original context of the scaled ropes


def hashable(changes: dict[str, Any]) -> dict[str, Any]:
    """Arguments made hashable for tiny_model's cache."""
    frozen = {dict: _Frozen, list: _FrozenList}
    return {key: frozen.get(type(value), lambda same: same)(value) for key, value in changes.items()}


class _Frozen(dict[str, Any]):
    def __hash__(self) -> int:
        return hash(repr(sorted(self.items())))


class _FrozenList(list[Any]):
    def __hash__(self) -> int:
        return hash(tuple(self))


def logits_in_chunks(engine: Engine, tokens: Seq[int], first: int, chunk: int) -> Tensor:
    """Logits [T, V] of all positions: the first `first` in one pass, then chunk by chunk."""
    sequence, start, pieces = new_sequence(engine, tokens), 0, []
    while start < len(tokens):
        length = min(chunk if start else first, len(tokens) - start)
        logits = torch.as_tensor(engine.runner.forward([Span(sequence, start, length, length)]).logits)
        pieces.append(logits.clone())  # the next pass of `native` overwrites them
        start += length
    engine.memory.release(sequence)
    return torch.cat(pieces)


def assert_logits(model: Model, tokens: Seq[int], expected: Tensor, *splits: tuple[int, int], **settings: Any) -> None:
    """Compares logits for each split (rows of the first pass, rows of later passes) with the expected logits."""
    assert expected.std() > 0.3, "logits too small for the tolerance to mean anything"
    engine = make(model, dtype="float32", drafter="none", **settings)
    for first, chunk in splits:
        assert float((logits_in_chunks(engine, tokens, first, chunk) - expected).abs().max()) <= 2e-4, (first, chunk)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "variant"), CASES)
def test_logits_match_transformers(family: str, variant: str) -> None:
    """In chunks; the unchanged family also in one pass, in many small passes, and row by row."""
    model = tiny_model(family, dtype="float32", **hashable(changes_of(family, variant)))
    tokens = [token % model.config.vocab_size for token in prompt_of(LENGTH, 5)]
    expected = logits_of_oracle(oracle_of(family, model), tokens)
    if variant != "as it is":
        assert_logits(model, tokens, expected, (7, 41))
        return
    assert_logits(model, tokens, expected, (LENGTH, 1), (7, 7))
    assert_logits(model, tokens[:45], expected[:45], (1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_mixed_batch_match_transformers(family: str) -> None:
    """One pass with prefill, a chunk and single rows of several sequences."""
    model = tiny_model(family, dtype="float32")
    engine = make(model, dtype="float32", drafter="none", max_model_len=512, kv_blocks=200)
    # spans and contexts on both sides of the reference backend's group boundaries
    lengths = ((60, 0), (33, 12), (9, 8), (300, 290), (129, 128), (257, 200), (128, 124))
    oracle, parts = oracle_of(family, model), [(prompt_of(length, length), start) for length, start in lengths]
    spans, expected = [], []
    for tokens, start in parts:
        sequence = new_sequence(engine, tokens, computed=start)
        spans.append(Span(sequence, start, len(tokens) - start, 2 if start < 8 else 1))
        expected.append(logits_of_oracle(oracle, tokens)[-spans[-1].num_sample :])
    assert float((engine.runner.forward(spans).logits - torch.cat(expected)).abs().max()) <= 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_matches_transformers(family: str) -> None:
    model, prompt = tiny_model(family, dtype="float32"), prompt_of(12, 8)
    engine = make(model, dtype="float32", drafter="auto", depth=3, max_model_len=256)
    tokens = run(engine, [request(prompt, max_tokens=24, stops=())])["r", 0].tokens
    assert len(tokens) == 24
    assert_greedy_text(oracle_of(family, model), prompt, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_are_close(family: str) -> None:
    # rounding decides at the edge of an indexer's selection, which must be a small part of the visible positions
    wide = {"index_topk": 72, "candidate_topk_blocks": 24}
    changes = {key: value for key, value in wide.items() if key in family_of(family).small}
    model, tokens = tiny_model(family, dtype="bfloat16", **changes), prompt_of(LENGTH, 5)
    expected = logits_of_oracle(oracle_of(family, model), tokens)
    engine = make(model, dtype="bfloat16", drafter="auto", depth=3)
    found = logits_in_chunks(engine, tokens, 7, 41)
    assert float((found.float() - expected.float()).abs().mean()) <= 0.1 * float(expected.float().std())
    assert len(run(engine, [request(prompt_of(12, 8), max_tokens=8, stops=())])["r", 0].tokens) == 8


@pytest.mark.parametrize("layers", [2, 3])  # one layer has the window; none has it
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_the_last_layers_match_transformers(family: str, layers: int) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 9}
    model = tiny_model(family, dtype="float32", **changes, max_window_layers=layers)
    tokens = prompt_of(LENGTH, 5)
    assert_logits(model, tokens, logits_of_oracle(oracle_of(family, model), tokens), (LENGTH, 1))


def test_unknown_rope_is_refused() -> None:
    with pytest.raises(ModelError, match="rope scaling type 'spiral'"):
        tiny_model(FAMILIES[0], **hashable({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}))


MTP_FAMILIES = [name for name, row in ROWS.items() if row.mtp]


def expected_draft_logits(family: str, states: Tensor, tokens: Seq[int], length: int, depth: int) -> list[Tensor]:
    """Draft logits [V] of steps 1 .. depth after `length` tokens, with true tokens as inputs; `states` are the trunk's
    for all tokens."""
    oracle, order = mtp_oracle(family), ROWS[family].modules or (0,) * depth
    recycled = hidden = states[: length - 1]
    drafted: list[Any] = [([], []) for _ in range(max(order) + 1)]  # rows and tokens after the true pairs
    logits: list[Tensor] = []
    for step in range(depth):
        rows, ids = drafted[order[step]]
        if step:
            rows.append(recycled[-1:])
            ids.append(tokens[length + step - 1])
        output, recycled = oracle.forward(torch.cat((hidden, *rows)), [*tokens[1:length], *ids], order[step])
        logits.append(output[-1])
    return logits


class ForcedDraw:
    """Replaces Runner.draw: records logits and returns the true tokens."""

    def __init__(self, truth: Seq[int]) -> None:
        self.truth = truth
        self.seen: dict[tuple[int, int], Tensor] = {}  # (length, draft step) -> logits

    def __call__(self, logits: Tensor, entries: Any, token_ids: Any = None, *, scored: bool = False) -> Sampled:
        for row, (sequence, position, prefix) in zip(logits, entries, strict=True):
            assert position == len(sequence.tokens) + len(prefix)
            self.seen[len(sequence.tokens), len(prefix)] = row
        return Sampled(np.array([self.truth[position] for _, position, _ in entries]), [None] * len(entries))

    def check(self, length: int, logits: list[Tensor]) -> None:
        for step, expected in enumerate(logits):  # norms of 1 + w are rounded to float32
            torch.testing.assert_close(self.seen[length, step], expected, rtol=1e-5, atol=1e-6)


def test_every_mtp_family_has_an_oracle() -> None:
    modules = {name for name in ALL_FAMILIES if family_of(name).head and family_of(name).mtp.method == "mtp"}
    assert modules == {*MTP_FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_draft_logits_of_a_growing_sequence_match_the_oracle(family: str) -> None:
    """Drafts with true tokens at every length; each round fills the pairs added since the last."""
    model, tokens = mtp_oracle(family).model, prompt_of(22, 3)
    states = mtp_oracle(family).trunk_states(tokens)
    engine = make(model, drafter="mtp", depth=3)
    engine.runner.draw = forced = ForcedDraw(tokens)
    sequence = new_sequence(engine, tokens, 2)
    for length in range(2, len(tokens) - 3):
        if length % 5 == 0:
            continue  # two new tokens at once, as after an accepted draft
        sequence.tokens = list(tokens[:length])
        engine.runner.forward([Span(sequence, sequence.num_computed, length - 1 - sequence.num_computed, 0)])
        sequence.num_computed = length - 1
        engine.drafting.drafter.propose([DraftRequest(sequence, 3)])
        assert sequence.draft.tokens == tokens[length : length + 3]
        forced.check(length, expected_draft_logits(family, states, tokens, length, 3))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [17, 512])
@pytest.mark.parametrize("family", [name for name in MTP_FAMILIES if name in FAMILIES])
def test_draft_logits_of_a_ragged_batch_match_the_oracle(family: str, budget: int) -> None:
    """Sequences of many lengths and depths in one round; long ones are filled in chunks."""
    model, tokens = mtp_oracle(family).model, prompt_of(50, 4)
    states = mtp_oracle(family).trunk_states(tokens)
    engine = make(model, drafter="mtp", depth=3, max_num_batched_tokens=budget)
    engine.runner.draw = forced = ForcedDraw(tokens)
    rounds = ((2, 3), (3, 1), (17, 2), (18, 3), (19, 4), (44, 2))
    requests = [DraftRequest(new_sequence(engine, tokens, length, length - 1), depth) for length, depth in rounds]
    engine.drafting.drafter.propose(requests)
    assert len(forced.seen) == sum(depth for _, depth in rounds)
    for (length, depth), each in zip(rounds, requests, strict=True):
        # with recurrent states the newest pair is computed again
        assert each.sequence.filled[0] == length - bool(model.head.modules[0].block.state_specs)
        forced.check(length, expected_draft_logits(family, states, tokens, length, depth))


def test_tiny_models_share_a_vocabulary_size() -> None:
    assert all(family_of(name).tiny()[0]["vocab_size"] == VOCAB for name in FAMILIES)
