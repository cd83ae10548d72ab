"""GGUF files of families with Kimi delta attention, HY-V4 and MiniMax-M3, as written by llama.cpp b11434's
converter."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import stacked
from support import family_of, model_at
from test_checkpoints import logits_of
from test_converted_families import (
    SIGMOID,
    Config,
    Converted,
    experts,
    indexer,
    latent_keys,
    latent_names,
    write_converted,
)
from tiny_models import write_model

from headstart.layers.mla import MLAConfig
from headstart.models.small import Arrays

NAMES = {
    r"^model\.(embed_tokens|word_embeddings)": "token_embd", r"^model\.norm": "output_norm", r"^lm_head": "output",
    r"^model\.hc_head\.hc_head_(\w+)": r"output_hc_\1.weight", r"^model\.layers\.": "blk.",
    r"^model\.output_attn_res_proj": "output_res_score", r"\.self_attention_res_proj": ".attn_res_score",
    r"\.mlp_res_proj": ".ffn_res_score", r"\.input_layernorm": ".attn_norm",
    r"\.post_attention_layernorm": ".ffn_norm", r"\.(self_attn|attention)\.": ".attn.",
    r"\.attn\.A_log": ".ssm_a", r"\.attn\.dt_bias": ".ssm_dt.bias", r"\.attn\.b_proj": ".ssm_beta",
    r"\.attn\.o_norm": ".ssm_norm", r"\.attn\.([fg]_[ab])_proj": r".ssm_\1", r"\.attn\.f_proj": ".ssm_f_a",
    r"\.attn\.([qkv])_conv1d": r".ssm_conv1d_\1", r"\.attn\.(linear_gate|g_proj)": ".attn_gate",
    r"\.attn\.(o_proj|dense)": ".attn_output", r"\.attn\.kv_a_proj_with_mqa": ".attn_kv_a_mqa",
    r"\.attn\.index_": ".indexer.", r"\.attn\.([qk])_norm": r".attn_\1_norm",
    r"\.attn\.(kv|q)_a_layernorm": r".attn_\1_a_norm", r"\.attn\.(\w+)_proj": r".attn_\1",
    r"\.attn\.learnable_sink_param": ".attn_sinks.weight", r"\.attn\.indexer\.wq_b": ".indexer.attn_q_b",
    r"\.attn\.indexer\.wk": ".indexer.attn_k", r"\.attn\.indexer\.weights_proj": ".indexer.proj",
    r"\.attn\.indexer\.k_norm": ".indexer.k_norm",
    r"\.attn\.indexer\.index_kpool_compress_(\w+)": r".indexer_compressor_\1.weight",
    r"\.hc_mlp_layer\.hc_pre\.hc_(\w+)": r".hc_ffn_\1.weight",
    r"\.hc_attn_layer\.hc_pre\.hc_(\w+)": r".hc_attn_\1.weight",
    r"\.hc_(attn|ffn)_(\w+)$": r".hc_\1_\2.weight", r"\.block_sparse_moe\.": ".mlp.",
    r"\.experts\.w1\.": ".experts.gate_proj.", r"\.experts\.w2\.": ".experts.down_proj.",
    r"\.experts\.w3\.": ".experts.up_proj.", r"\.mlp\.experts\.(\w+)_proj": r".ffn_\1_exps",
    r"\.mlp\.shared_experts\.(\w+)_proj": r".ffn_\1_shexp", r"\.mlp\.routed_expert_(down|up)_proj": r".ffn_routed_\1",
    r"\.mlp\.routed_expert_norm": ".ffn_routed_norm", r"\.mlp\.(gate|up|down)_proj": r".ffn_\1",
    r"\.mlp\.(gate\.)?(e_score_correction.bias|expert_bias)": ".exp_probs_b.bias", r"\.mlp\.gate\.": ".ffn_gate_inp.",
    r"\.(eh_proj|enorm|hnorm)": r".nextn.\1", r"\.final_layernorm": ".layer_output_norm",
    r"\.weight\.weight$": ".weight",
}  # fmt: skip
"""Names of all these families -> llama.cpp's, in this order."""
LINEAR_GATE = {"kimi_k3": "ssm_g", "bailing_hybrid": "ssm_g_a"}


def names(arrays: Arrays, config: Config) -> Arrays:
    found: dict[str, Any] = {}
    linear = {name.split(".A_log")[0] for name in arrays if name.endswith(".A_log")}
    for name, array in stacked(latent_names(arrays, config) if "kv_lora_rank" in config else arrays).items():
        short = name
        if name.endswith(".g_proj.weight") and name.removesuffix(".g_proj.weight") in linear:
            layer = name.split(".")[2]
            short = f"blk.{layer}.{LINEAR_GATE[config['model_type']]}.weight"
        for old, new in NAMES.items():
            short = re.sub(old, new, short)
        if "conv1d" in name:
            array = array.reshape(1, array.shape[0], 1, -1)
        elif name.endswith("A_log"):
            sign = 1 if config["model_type"] == "bailing_hybrid" else -1
            array = (sign * np.exp(array)).reshape(-1, 1)
        elif name.endswith("_res_proj.weight"):
            array = (array * arrays[name.replace("_proj.", "_norm.")]).reshape(-1)
        if not name.endswith("_res_norm.weight"):
            found[short] = array
    return found


def delta_keys(config: Config) -> Config:
    """Keys common to families with Kimi delta attention."""
    linear = config.get("linear_attn_config") or {}
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    first = linear.get("full_attn_layers") or [2, 4]
    count = "n_routed_experts" if config.get("n_routed_experts") else "num_experts"
    used = "num_experts_per_tok" if config.get("num_experts_per_tok") else "num_experts_per_token"
    return experts(config, count, used) | {
        "attention.head_count_kv": [int(i + 1 in first) for i in range(4)],
        "attention.q_lora_rank": config.get("q_lora_rank"),
        "attention.kv_lora_rank": rank, "attention.key_length": rank + rotary,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": config["v_head_dim"], "rope.dimension_count": rotary,
        "ssm.conv_kernel": 4, "kda.head_dim": 12, "leading_dense_block_count": config.get("first_k_dense_replace"),
        "expert_weights_scale": float(config["routed_scaling_factor"]), "expert_gating_func": SIGMOID,
        "expert_shared_count": config.get("n_shared_experts") or config["num_shared_experts"],
        "expert_weights_norm": True, "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("n_group") and config["topk_group"],
    }  # fmt: skip


def glm_keys(config: Config) -> Config:
    return delta_keys(config) | indexer(config) | {
        "kda.gate_lower_bound": -3.0, "attention.layer_norm_epsilon": 1e-6,
        "attention.indexer.kpool": config["index_kpool"],
        "attention.indexer.kpool_select_tail": True, "hyper_connection.count": config["hc_mult"],
        "hyper_connection.sinkhorn_iterations": config["hc_sinkhorn_iters"],
        "hyper_connection.epsilon": config["hc_eps"], "swiglu_clamp_exp": [10.0] * 4, "swiglu_clamp_shexp": [10.0] * 4,
    }  # fmt: skip


def k3_keys(config: Config) -> Config:
    return delta_keys(config) | {
        "kda.gate_lower_bound": -3.0, "expert_latent_length": config["routed_expert_hidden_size"],
        "activation.situ_beta": 4.0, "activation.situ_linear_beta": 25.0,
        "attn_res.block_size": config["attn_res_block_size"],
    }  # fmt: skip


def ling_keys(config: Config) -> Config:
    return delta_keys(config) | {
        "attention.head_count_kv": [0, 1, 0, 1, 1], "kda.gate_lower_bound": -3.0, "kda.safe_gate": True,
        "rope.freq_base": 6e6, "expert_shared_feed_forward_length": config["moe_intermediate_size"],
    }  # fmt: skip


def hy_keys(config: Config) -> Config:
    return latent_keys(config) | {
        "hyper_connection.count": config["hc_mult"], "hyper_connection.epsilon": config["hc_eps"],
        "hyper_connection.magnitude": config["hc_magnitude"], "swiglu_clamp_exp": [10.0] * 3,
    }  # fmt: skip


def m3_keys(config: Config) -> Config:
    return experts(config, "num_local_experts", inner="intermediate_size") | {
        "feed_forward_length": config["dense_intermediate_size"], "leading_dense_block_count": 1,
        "expert_shared_count": 1, "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": True, "expert_gating_func": SIGMOID, "rope.dimension_count": config["rotary_dim"],
        "rope.freq_base": float(config["rope_theta"]), "attention.value_length": config["head_dim"],
        "attention.indexer.head_count": config["index_n_heads"],
        "attention.indexer.key_length": config["index_head_dim"],
        "attention.indexer.top_k": config["index_topk_blocks"],
        "attention.indexer.block_size": config["index_block_size"], "attention.indexer.local_blocks": 1,
    }  # fmt: skip


def m3_names(arrays: Arrays, config: Config) -> Arrays:
    return names({name: array + name.endswith("norm.weight") for name, array in arrays.items()}, config)


def of_kda(**more: Any) -> Config:
    full = {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 12, "num_heads": 6}
    return {"linear_attn_config": {**full, "short_conv_kernel_size": 4, **more}, "max_position_embeddings": 512}


KIMI = Converted("kimi-linear", delta_keys, names)
CONVERTED: dict[str, tuple[Converted, Config]] = {
    "kimi_linear": (KIMI, {**of_kda(), "num_expert_group": 1, "topk_group": 1}),
    "kimi_k3": (
        Converted("kimi-k3", k3_keys, names, table="kimi-linear"),
        {**of_kda(gate_lower_bound=-3.0, use_full_rank_gate=True), "num_nextn_predict_layers": 0},
    ),
    "glm5_next": (
        Converted("glm5-next", glm_keys, names, table="kimi-linear"),
        {"linear_num_heads": 6, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    ),
    "bailing_hybrid": (Converted("bailingmoe3", ling_keys, names, modules=1, table="kimi-linear"), {}),
    "minimax_m3": (
        Converted("minimax-m3", m3_keys, m3_names, table="kimi-linear"),
        {"shared_intermediate_size": 24, "num_mtp_modules": 0},
    ),
    # files have one flag if all indexers are full
    "hy_v4": (
        Converted("hy_v4", hy_keys, names, table="kimi-linear"),
        {"rope_interleave": None, "indexer_types": ["full"] * 3, "num_nextn_predict_layers": 0},
    ),
}
"""Family -> how it is converted, and changes of its small config: linear layers have as many heads as others."""


@pytest.mark.parametrize("family", CONVERTED)
def test_converted_file_equals_the_checkpoint(family: str, tmp_path: Path) -> None:
    how, changes = CONVERTED[family]
    config, arrays = family_of(family).tiny(**changes)
    plain = model_at(write_model(tmp_path / "plain", config, arrays))
    found = model_at(write_converted(tmp_path / "model.gguf", config, arrays, how))
    assert float((logits_of(found) - logits_of(plain)).abs().max()) <= 3e-5  # K3's scores are products in float32
    assert bool(found.head) == bool(how.modules)
    if found.head:
        assert plain.head and replace(found.head.spec, layer=None) == replace(plain.head.spec, layer=None)


def test_hy_v4_rotates_neighbours_unless_disabled() -> None:
    family = family_of("hy_v4")
    for setting, paired in ((None, True), (True, True), (False, False)):
        for layer in family.read(family.tiny_config(rope_interleave=setting)).layers:
            assert isinstance(layer.mixer, MLAConfig)
            assert layer.mixer.interleaved is paired
            assert layer.mixer.indexer is None or layer.mixer.indexer.interleaved is paired
