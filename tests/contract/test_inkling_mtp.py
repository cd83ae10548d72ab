"""Inkling's MTP modules: blocks with convolutions, whose states the draft network keeps beside the trunk's."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from family_rows import ROWS
from oracles import MTPOracle
from support import Outputs, family_of, make, model_at, new_sequence, prompt_of, request, run
from test_families import Forced, changed
from tiny_models import write_model

from headstart.core import Span
from headstart.drafters.base import DraftRequest

MTP = {"num_nextn_predict_layers": 1, "local_layer_ids": [0], "chain_hidden_post_norm": False}


def test_drafts_with_full_attention_and_a_norm_after_the_block() -> None:
    module = ROWS["inkling"].mtp
    assert module
    module = replace(module, norm="model.mtp.chain_norm", config={"local_layer_ids": [], "dense_mlp_idx": 1})
    changes = {"mtp_config": {**MTP, "local_layer_ids": [], "chain_hidden_post_norm": True}}
    oracle = MTPOracle("inkling", module, **changed(changes))
    tokens = prompt_of(40, 3)
    states = oracle.trunk_states(tokens)
    engine = make(oracle.model, drafter="mtp", depth=2)
    engine.runner.draw = forced = Forced(tokens)
    sequence = new_sequence(engine, tokens, 2)
    for length in (2, 3, 5, 21, 22, 35):  # a token at once, several, more than the convolutions see
        sequence.tokens = list(tokens[:length])
        engine.runner.forward([Span(sequence, sequence.num_computed, length - 1 - sequence.num_computed, 0)])
        sequence.num_computed = length - 1
        engine.drafting.drafter.propose([DraftRequest(sequence, 2)])
        logits, recycled = oracle.forward(states[: length - 1], tokens[1:length])
        forced.check(length, [logits[-1]])
        hidden = states[: length - 1].new_tensor([*states[: length - 1].tolist(), recycled[-1].tolist()])
        logits, _ = oracle.forward(hidden, tokens[1 : length + 1])
        assert float((forced.seen[length, 1] - logits[-1]).abs().max()) < 1e-5


def drafts(path: Path, backend: str, **settings: Any) -> Outputs:
    requests = [request(prompt_of(30, 7)[: 10 + 7 * i], name=str(i), max_tokens=30) for i in range(3)]
    return run(make(model_at(path, backend), drafter="mtp", depth=3, block_size=16, **settings), requests)


def published(folder: Path, modules: int) -> Path:
    """A model whose file holds modules with equal weights."""
    config, arrays = family_of("inkling").tiny(mtp_config=MTP)
    config["mtp_config"] = {**MTP, "num_nextn_predict_layers": modules}
    for name, array in list(arrays.items()):
        arrays |= {name.replace("mtp.layers.0.", f"mtp.layers.{i}."): array for i in range(modules)}
    return write_model(folder, config, arrays)


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_the_first_of_several_modules_drafts(tmp_path: Path, backend: str) -> None:
    one, three = (drafts(published(tmp_path / str(count), count), backend) for count in (1, 3))
    assert one == three
    uncached = drafts(tmp_path / "1", backend, enable_prefix_caching=False)
    assert [each.tokens for each in uncached.values()] == [each.tokens for each in one.values()]
    assert all(each.stats and each.stats.drafted for each in one.values())
    assert model_at(tmp_path / "3", backend).config.num_mtp == 1


def test_an_incomplete_file_is_served_without_its_module(tmp_path: Path) -> None:
    config, arrays = family_of("inkling").tiny(mtp_config=MTP)
    del arrays["model.mtp.layers.0.input_proj.weight"]
    model = model_at(write_model(tmp_path / "model", config, arrays))
    assert model.head is None and "missing" in model.broken_head
