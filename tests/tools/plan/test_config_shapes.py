"""Shapes derived from published config.json files: parameter counts and attention windows."""

from typing import Any

import pytest

from headstart.tools.plan.sources import shape_of

STEP_KINDS = (["full_attention"] + ["sliding_attention"] * 3) * 12
CONFIGS: dict[str, tuple[dict[str, Any], float, float]] = {
    "ERNIE-4.5-21B-A3B": (
        {
            "model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288, "num_attention_heads": 20,
            "num_key_value_heads": 4, "num_hidden_layers": 28, "vocab_size": 103424, "moe_num_experts": 64, "moe_k": 6,
            "moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "head_dim": 128,
            "moe_layer_interval": 1, "tie_word_embeddings": True,
        }, 21.8, 3.0),
    "Step-3.5-Flash": (
        {
            "model_type": "step3p5", "hidden_size": 4096, "intermediate_size": 11264, "num_attention_heads": 64,
            "num_attention_groups": 8, "head_dim": 128, "num_hidden_layers": 45, "vocab_size": 128896,
            "moe_num_experts": 288, "moe_top_k": 8, "moe_intermediate_size": 1280, "share_expert_dim": 1280,
            "moe_layers_enum": ",".join(map(str, range(3, 45))), "layer_types": STEP_KINDS, "sliding_window": 512,
            "attention_other_setting": {"num_attention_heads": 96, "num_attention_groups": 8, "head_dim": 128},
        }, 196.8, 11.0),
    "LFM2-1.2B": (
        {
            "model_type": "lfm2", "hidden_size": 2048, "block_ff_dim": 12288, "block_multiple_of": 256,
            "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "num_attention_heads": 32,
            "num_key_value_heads": 8, "num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
            "vocab_size": 65536, "conv_L_cache": 3, "tie_word_embeddings": True,
        }, 1.17, 1.17),
    "Llama-4-Scout": (
        {
            "model_type": "llama4", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
            "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 48,
            "vocab_size": 202048, "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
            "no_rope_layers": [], "attention_chunk_size": 8192,
        }, 107.8, 17.0),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_match_the_published_counts(name: str) -> None:
    config, total, active = CONFIGS[name]
    shape = shape_of(name, config)
    counts = shape.parameters()
    assert (sum(counts.values()) - counts["head"]) / 1e9 == pytest.approx(total, rel=0.02)
    assert shape.active_parameters() / 1e9 == pytest.approx(active, rel=0.12)


SIZES = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 32, "vocab_size": 32000,
}  # fmt: skip
QWEN2 = {"model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28}
LLAMA4 = {"moe_layers": [], "intermediate_size_mlp": 14336}
WINDOWS: dict[str, tuple[dict[str, Any], int]] = {
    "Mistral-7B-v0.1": ({"model_type": "mistral", "sliding_window": 4096}, 32),
    "Mistral-7B-v0.3": ({"model_type": "mistral", "sliding_window": None}, 0),
    "Qwen2.5": ({**QWEN2, "use_sliding_window": False}, 0),
    "Qwen2.5 with its window": ({**QWEN2, "use_sliding_window": True}, 4),
    "an unknown family": ({"sliding_window": 4096, "model_type": "made_up"}, 32),
    "chunks": ({"model_type": "llama4_text", "attention_chunk_size": 4096, "no_rope_layers": [], **LLAMA4}, 24),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windowed_layers_cache_one_window_only(name: str) -> None:
    more, count = WINDOWS[name]
    kept = [
        sum(group.count * group.cost.mixer.cached(context) for group in shape_of(name, SIZES | more).layers)
        for context in (4096, 4097)
    ]
    assert kept[1] - kept[0] == (32 - count) * 2 * 8 * 128
