"""MiniMax-M3 matches transformers at lengths where its indexers skip blocks."""

from pathlib import Path

import pytest
import torch
from oracles import build_oracle, config_and_tensors, logits_of_oracle
from support import family_of, make, model_at, new_sequence
from tiny_models import write_model

from headstart.core import Span
from headstart.models.families import family_named

BLOCKS = {
    "sparse_num_index_heads": 2, "sparse_index_dim": 10, "sparse_local_block": 1, "sparse_init_block": 0,
    "sparse_score_type": "max",
}  # fmt: skip
SHAPES = {"as released: 128 positions, 16 blocks": (128, 16, 2300), "short blocks": (5, 2, 77), "one block": (8, 1, 50)}


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_with_selected_blocks_match_transformers(tmp_path: Path, shape: str) -> None:
    size, top_k, length = SHAPES[shape]
    sparse = {**BLOCKS, "sparse_block_size": size, "sparse_topk_blocks": top_k, "sparse_attention_freq": [0, 1, 1]}
    tiny = family_of("minimax_m3").tiny(
        sparse_attention_config=sparse, num_mtp_modules=0, max_position_embeddings=2 * length
    )
    model = model_at(write_model(tmp_path, *tiny))
    assert model.config.max_length == 2 * length
    config, tensors = config_and_tensors("minimax_m3", model)
    oracle, missing, _ = build_oracle("minimax_m3", config, tensors)
    assert not missing - {"lm_head.weight"}
    tokens = [(7 * i * i + 3 * i // 5) % model.config.vocab_size for i in range(length)]
    theirs = logits_of_oracle(oracle, tokens)
    full = {"layer_types": ["full_attention"] * len(config["layer_types"])}
    dense, _, _ = build_oracle("minimax_m3", config | full, tensors)
    everything = logits_of_oracle(dense, tokens)
    torch.testing.assert_close(theirs[: size * top_k], everything[: size * top_k], atol=1e-4, rtol=0)
    assert (everything - theirs)[-5:].abs().max() > 1e-2  # some blocks are skipped
    for backend in ("reference", "native"):
        engine = make(model, backend=backend, dtype="float32", drafter="none", max_model_len=length, kv_blocks=length)
        spans = [(0, length - 9), (length - 9, length - 1), (length - 1, length)]  # a prompt, a draft, one row
        sequence, ours = new_sequence(engine, tokens, computed=0), []
        for begin, end in spans:
            ours.append(engine.runner.forward([Span(sequence, begin, end - begin, end - begin)]).logits)
        ours = torch.cat([torch.as_tensor(each).float() for each in ours])
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["self_attn.index_q_proj.weight", "self_attn.index_k_norm.weight"])
def test_indexer_tensors_are_renamed(name: str) -> None:
    names = family_named("minimax_m3_vl").names
    assert names.canonical(f"language_model.model.layers.4.{name}") == f"layers.4.{name.replace('index_', 'indexer.')}"
    module = names.canonical(f"language_model.model.mtp.layers.0.transformer_layer.{name}")
    assert module == f"mtp.0.block.{name.replace('index_', 'indexer.')}"
