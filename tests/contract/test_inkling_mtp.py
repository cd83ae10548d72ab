"""Inkling's MTP modules: blocks with convolutions, whose states the draft network keeps apart from the trunk's; several
modules form a chain."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from family_rows import ROWS
from oracles import MTPOracle
from support import Outputs, family_of, make, model_at, new_sequence, prompt_of, request, run
from test_families import ForcedDraw, hashable
from tiny_models import write_model
from torch import Tensor

from headstart.core import Span
from headstart.drafters.base import DraftRequest

MTP = {"num_nextn_predict_layers": 1, "local_layer_ids": [0], "chain_hidden_post_norm": False}


class InklingModules(MTPOracle):
    """MTP modules; those listed in `local` have windows."""

    def __init__(self, modules: int, local: list[int], *, norm: bool) -> None:
        module, self.local = ROWS["inkling"].mtp, local
        assert module
        mtp_config = {"num_nextn_predict_layers": modules, "local_layer_ids": local, "chain_hidden_post_norm": norm}
        module = replace(module, norm="model.mtp.chain_norm" if norm else "")
        super().__init__("inkling", module, **hashable({"mtp_config": mtp_config}))

    def _build_module(self, module: int) -> Any:
        local = [0] if module in self.local else []
        self.mtp = replace(self.mtp, config={"local_layer_ids": local, "dense_mlp_idx": 1})
        return super()._build_module(module)


def test_drafts_with_full_attention_and_a_final_norm_match_the_oracle() -> None:
    oracle = InklingModules(1, [], norm=True)
    tokens = prompt_of(40, 3)
    states = oracle.trunk_states(tokens)
    engine = make(oracle.model, drafter="mtp", depth=2)
    engine.runner.draw = forced = ForcedDraw(tokens)
    sequence = new_sequence(engine, tokens, 2)
    for length in (2, 3, 5, 21, 22, 35):  # one new token, several, and more than the convolutions see
        sequence.tokens = list(tokens[:length])
        engine.runner.forward([Span(sequence, sequence.num_computed, length - 1 - sequence.num_computed, 0)])
        sequence.num_computed = length - 1
        engine.drafting.drafter.propose([DraftRequest(sequence, 2)])
        logits, recycled = oracle.forward(states[: length - 1], tokens[1:length])
        forced.check(length, [logits[-1]])
        hidden = states[: length - 1].new_tensor([*states[: length - 1].tolist(), recycled[-1].tolist()])
        logits, _ = oracle.forward(hidden, tokens[1 : length + 1])
        assert float((forced.seen[length, 1] - logits[-1]).abs().max()) < 1e-5


def chained_logits(oracle: MTPOracle, states: Tensor, tokens: list[int], length: int, depth: int) -> list[Tensor]:
    """Draft logits [V] of each step after `length` tokens, as vLLM's speculator computes them: module i runs over all
    positions, on the outputs of module i - 1 and the tokens i positions ahead."""
    hidden, found = states[: length - 1], []
    for module in range(depth):
        logits, hidden = oracle.forward(hidden, tokens[1 + module : length + module], module)
        found.append(logits[-1])
    return found


@pytest.mark.parametrize(("local", "norm"), [([0, 2], True), ([], False)])
def test_draft_logits_of_a_chain_match_the_oracle(local: list[int], norm: bool) -> None:
    oracle = InklingModules(3, local, norm=norm)
    tokens = prompt_of(40, 3)
    states = oracle.trunk_states(tokens)
    engine = make(oracle.model, drafter="mtp", depth=3)
    engine.runner.draw = forced = ForcedDraw(tokens)
    sequence = new_sequence(engine, tokens, 2)
    for length, depth in ((2, 3), (3, 1), (4, 2), (7, 3), (7, 3), (8, 3), (21, 1), (22, 1), (24, 3), (35, 3)):
        sequence.tokens = list(tokens[:length])
        if length - 1 > sequence.num_computed:
            engine.runner.forward([Span(sequence, sequence.num_computed, length - 1 - sequence.num_computed, 0)])
        sequence.num_computed = length - 1
        engine.drafting.drafter.propose([DraftRequest(sequence, depth)])
        assert sequence.draft.tokens == tokens[length : length + depth]
        forced.check(length, chained_logits(oracle, states, tokens, length, depth))


@pytest.mark.parametrize("budget", [7, 512])
def test_draft_logits_of_a_chain_over_a_ragged_batch_match_the_oracle(budget: int) -> None:
    """Sequences of many lengths and depths in one round; long ones are filled in chunks."""
    oracle = InklingModules(3, [1], norm=True)
    tokens = prompt_of(50, 4)
    states = oracle.trunk_states(tokens)
    engine = make(oracle.model, drafter="mtp", depth=3, max_num_batched_tokens=budget)
    engine.runner.draw = forced = ForcedDraw(tokens)
    rounds = ((2, 3), (3, 1), (17, 2), (18, 3), (19, 1), (44, 2))
    requests = [DraftRequest(new_sequence(engine, tokens, length, length - 1), depth) for length, depth in rounds]
    engine.drafting.drafter.propose(requests)
    assert len(forced.seen) == sum(depth for _, depth in rounds)
    for length, depth in rounds:
        forced.check(length, chained_logits(oracle, states, tokens, length, depth))


def run_with_drafts(path: Path, backend: str, **settings: Any) -> Outputs:
    requests = [request(prompt_of(30, 7)[: 10 + 7 * i], name=str(i), max_tokens=30) for i in range(3)]
    return run(make(model_at(path, backend), drafter="mtp", depth=3, block_size=16, **settings), requests)


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("modules", [1, 3])
def test_drafts_keep_the_text(tmp_path: Path, backend: str, modules: int) -> None:
    mtp_config = {"num_nextn_predict_layers": modules, "local_layer_ids": [0, 2], "chain_hidden_post_norm": modules > 1}
    path = write_model(tmp_path / "model", *family_of("inkling").tiny(mtp_config=mtp_config))
    found = run_with_drafts(path, backend)
    uncached = run_with_drafts(path, backend, enable_prefix_caching=False)
    plain = run(make(model_at(path, backend), drafter="none", block_size=16), [
        request(prompt_of(30, 7)[: 10 + 7 * i], name=str(i), max_tokens=30) for i in range(3)
    ])  # fmt: skip
    assert len({tuple(map(tuple, (e.tokens for e in each.values()))) for each in (found, uncached, plain)}) == 1
    assert all(each.stats and each.stats.drafted for each in found.values())
    assert model_at(path, backend).config.num_mtp == modules


def test_incomplete_module_leaves_the_trunk_served(tmp_path: Path) -> None:
    config, arrays = family_of("inkling").tiny(mtp_config=MTP)
    del arrays["model.mtp.layers.0.input_proj.weight"]
    model = model_at(write_model(tmp_path / "model", config, arrays))
    assert model.head is None and "missing" in model.broken_head
