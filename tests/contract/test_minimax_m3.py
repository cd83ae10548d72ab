"""MiniMax-M3 up to the longest context at which its indexers select all blocks."""

from pathlib import Path

import pytest
import torch
from oracles import build_oracle, config_and_tensors, logits_of_oracle
from support import family_of, make, model_at, new_sequence
from tiny_models import write_model

from headstart.core import Span
from headstart.models.families import family_named

BLOCKS = {
    "sparse_topk_blocks": 3, "sparse_block_size": 8, "sparse_num_index_heads": 2, "sparse_index_dim": 8,
    "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1],
}  # fmt: skip


def test_all_blocks_are_selected_up_to_the_longest_context(tmp_path: Path) -> None:
    tiny = family_of("minimax_m3").tiny(sparse_attention_config=BLOCKS, num_mtp_modules=0)
    model = model_at(write_model(tmp_path, *tiny))
    assert model.config.max_length == 24
    config, tensors = config_and_tensors("minimax_m3", model)
    torch.manual_seed(0)
    oracle, missing, _ = build_oracle("minimax_m3", config, tensors)
    assert missing and all(".indexer." in name for name in missing)
    tokens = [(7 * i * i + 3) % model.config.vocab_size for i in range(40)]
    for name, parameter in oracle.named_parameters():
        if name in missing:
            torch.nn.init.normal_(parameter)
    theirs, short = logits_of_oracle(oracle, tokens), logits_of_oracle(oracle, tokens[:24])
    torch.testing.assert_close(theirs[:24], short, atol=1e-4, rtol=0)
    engine = make(model, dtype="float32", drafter="none", max_model_len=24)
    ours = engine.runner.forward([Span(new_sequence(engine, tokens[:24], computed=0), 0, 24, 24)]).logits
    torch.testing.assert_close(ours.float(), short, atol=2e-4, rtol=0)
    full = {key: value for key, value in config.items() if key != "sparse_attention_config"}
    dense, _, _ = build_oracle("minimax_m3", full, tensors)
    assert (logits_of_oracle(dense, tokens)[-1] - theirs[-1]).abs().max() > 1e-2  # some blocks are left


@pytest.mark.parametrize("name", ["self_attn.index_q_proj.weight", "self_attn.index_k_norm.weight"])
def test_tensors_of_indexers_are_left(name: str) -> None:
    names = family_named("minimax_m3_vl").names
    assert names.canonical(f"language_model.model.layers.4.{name}") is None
    assert names.canonical(f"language_model.model.mtp.layers.0.transformer_layer.{name}") is None
