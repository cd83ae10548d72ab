"""Families with experts as llama.cpp b11434's converter writes them: names by its own table, keys by its own words."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import add_vocabulary, written
from support import family_of, model_at
from test_checkpoints import logits_of

from headstart.models.small import Arrays
from headstart.tools.tiny import write_model

Config = dict[str, Any]
Writer = gguf.GGUFWriter
KEYS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads", "key_length": "head_dim", "layer_norm_rms_eps": "rms_norm_eps",
}  # fmt: skip
"""GGUFWriter.add_* of every file -> keys of config.json."""


@dataclass(frozen=True)
class Converted:
    """`keys`: what the converter adds; `renamed`: what it calls tensors before it looks them up; `modules`: MTP
    modules, after the trunk's layers; `table`: the architecture whose table of names the released package has."""

    arch: str
    keys: Callable[[Writer, Config], None]
    renamed: Callable[[Arrays, Config], Arrays] = lambda arrays, config: arrays
    modules: int = 0
    table: str = ""


def mimo_v2_keys(writer: Writer, config: Config) -> None:
    sliding = [False, True, True, *[True] * 3]
    writer.add_head_count_kv([2 if each else 1 for each in sliding])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(sliding)
    writer.add_value_length(config["v_head_dim"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_rope_dimension_count(4)
    writer.add_rope_freq_base(5e4)
    writer.add_rope_freq_base_swa(300.0)
    writer.add_float32("mimo2.attention.value_scale", 0.707)


def mimo_v2_names(arrays: Arrays, config: Config) -> Arrays:
    def new(name: str) -> str:
        name = re.sub(r"^model\.mtp\.layers\.(\d)", lambda m: f"model.layers.{int(m[1]) + 3}", name)
        name = name.replace("correction_bias", "correction.bias")
        return f"{name}.weight" if name.endswith("attention_sink_bias") else name

    return {new(name): array for name, array in arrays.items()}


def ernie_keys(writer: Writer, config: Config) -> None:
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_k"])
    writer.add_interleave_moe_layer_step(1)
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])
    writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])


def ernie_names(arrays: Arrays, config: Config) -> Arrays:
    new = {name.replace("correction_bias", "correction.bias"): array.squeeze() for name, array in arrays.items()}
    return {name: array for name, array in new.items() if ".mtp_" not in name}


def llama4_keys(writer: Writer, config: Config) -> None:
    writer.add_feed_forward_length(config["intermediate_size_mlp"])
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])


def llama4_names(arrays: Arrays, config: Config) -> Arrays:
    found: Arrays = {}
    for name, array in arrays.items():
        if name.endswith("gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(array.swapaxes(1, 2), 2, axis=1), strict=True):
                found[name.replace("gate_up_proj", f"{part}_proj.weight")] = half
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = array.swapaxes(1, 2)
        else:
            found[name] = array
    return found


def step_keys(writer: Writer, config: Config) -> None:
    sliding = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_head_count([6 if each else 4 for each in sliding])
    writer.add_head_count_kv([2] * 6)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(sliding)
    writer.add_value_length(config["head_dim"])
    writer.add_expert_count(config["moe_num_experts"])
    writer.add_expert_used_count(config["moe_top_k"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["share_expert_dim"])
    writer.add_expert_weights_scale(config["moe_router_scaling_factor"])
    writer.add_leading_dense_block_count(1)
    writer.add_uint32("step35.moe_every_n_layers", 1)
    writer.add_expert_weights_norm(True)
    writer.add_array("step35.swiglu_clamp_exp", [0.0, 7.0, 0.0, 0.0, 0.0, 0.0])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(5e4)
    writer.add_rope_freq_base_swa(300.0)


def step_names(arrays: Arrays, config: Config) -> Arrays:
    def new(name: str) -> str:
        name = name.replace(".transformer.", ".").replace("shared_head.output", "shared_head.head")
        return f"{name}.bias" if name.endswith("router_bias") else name

    return {new(name): array + 1 if name.endswith("norm.weight") else array for name, array in arrays.items()}


def gemma2_keys(writer: Writer, config: Config) -> None:
    writer.add_value_length(config["head_dim"])
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def gemma2_names(arrays: Arrays, config: Config) -> Arrays:
    return {name: array + 1 if name.endswith("norm.weight") else array for name, array in arrays.items()}


def latent_keys(writer: Writer, config: Config) -> None:
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length(rank + rotary)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_rope_dimension_count(rotary)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])
    if kinds := config.get("indexer_types"):
        writer.add_array(f"{writer.arch}.attention.indexer.types", [kind == "full" for kind in kinds])


def latent_names(arrays: Arrays, config: Config) -> Arrays:
    """kv_b_proj in its two parts, the first the other way round."""
    found, nope, value = dict[str, Any](), config["qk_nope_head_dim"], config["v_head_dim"]
    for name, array in arrays.items():
        if "kv_b_proj" in name:
            both = array.reshape(config["num_attention_heads"], nope + value, -1)
            found[name.replace("kv_b_proj", "k_b_proj")] = both[:, :nope].swapaxes(1, 2)
            found[name.replace("kv_b_proj", "v_b_proj")] = both[:, nope:]
        else:
            found[name.replace("correction_bias", "correction.bias")] = array
    return found


def sigmoid_keys(writer: Writer, config: Config) -> None:
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["num_shared_experts"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(config.get("router_scaling_factor") or config["routed_scaling_factor"])
    if config["model_type"] != "hy_v3":  # whose tensors alone tell
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_group_count(config.get("n_group", 1))
    writer.add_expert_group_used_count(config.get("topk_group", 1))
    writer.add_rope_dimension_count(int(config["head_dim"] * config.get("partial_rotary_factor", 1)))
    writer.add_rope_freq_base(config["rope_theta"])


def exaone_moe_keys(writer: Writer, config: Config) -> None:
    sigmoid_keys(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([True, False, True])


def exaone_moe_names(arrays: Arrays, config: Config) -> Arrays:
    parts = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head.norm",
    }
    found = {}
    for name, array in arrays.items():
        name = re.sub(r"^mtp\.layers\.0\.", "model.layers.3.", name).replace("correction_bias", "correction.bias")
        found[re.sub(r"^mtp\.(\w+)\.", lambda m: f"model.layers.3.{parts[m[1]]}.", name)] = array
    return found


V4_NAMES = {
    r"^embed\.": "token_embd.", r"^norm\.": "output_norm.", r"^head\.": "output.",
    r"^hc_head_(\w+)": r"output_hc_\1.weight",
    r"\.ffn\.shared_experts\.w1": ".ffn_gate_shexp", r"\.ffn\.shared_experts\.w2": ".ffn_down_shexp",
    r"\.ffn\.shared_experts\.w3": ".ffn_up_shexp", r"\.ffn\.experts\.w1": ".ffn_gate_exps",
    r"\.ffn\.experts\.w2": ".ffn_down_exps", r"\.ffn\.experts\.w3": ".ffn_up_exps",
    r"\.ffn\.gate\.bias": ".exp_probs_b.bias", r"\.ffn\.gate\.tid2eid": ".ffn_gate_tid2eid.weight",
    r"\.ffn\.gate\.": ".ffn_gate_inp.", r"\.(hc_\w+)$": r".\1.weight", r"\.attn\.attn_sink": ".attn_sinks.weight",
    r"\.attn\.indexer\.compressor\.": ".indexer_compressor_", r"\.attn\.compressor\.": ".attn_compressor_",
    r"compressor_ape": "compressor_ape.weight", r"compressor_wkv": "compressor_kv",
    r"compressor_wgate": "compressor_gate",
    r"\.attn\.indexer\.wq_b": ".indexer.attn_q_b", r"\.attn\.indexer\.weights_proj": ".indexer.proj",
    r"\.attn\.wq_(.)": r".attn_q_\1", r"\.attn\.q_norm": ".attn_q_a_norm", r"\.attn\.wkv": ".attn_kv",
    r"\.attn\.kv_norm": ".attn_kv_a_norm", r"\.attn\.wo_(.)": r".attn_output_\1", r"^layers\.": "blk.",
}  # fmt: skip
"""DeepSeek's names -> those of its own table in the converter."""


def v4_names(arrays: Arrays, config: Config) -> Arrays:
    found: dict[str, Any] = {}
    for name, array in arrays.items():
        short = re.sub(r"\.experts\.\d+", ".experts", name)
        for old, new in V4_NAMES.items():
            short = re.sub(old, new, short)
        if ".ffn.experts." in name:
            array = np.concatenate((*found.get(short, ()), array)).reshape(-1, *array.shape)
        if not name.startswith("mtp."):
            found[short] = array.astype(np.int32) if "tid2eid" in name else array
    return found


def v4_keys(writer: Writer, config: Config) -> None:
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_uint32("deepseek4.expert_gating_func", 4)
    writer.add_array("deepseek4.swiglu_clamp_exp", [10.0] * 3)
    writer.add_array("deepseek4.swiglu_clamp_shexp", [10.0] * 3)
    writer.add_indexer_head_count(config["index_n_heads"])
    writer.add_indexer_key_length(config["index_head_dim"])
    writer.add_indexer_top_k(config["index_topk"])
    for key, ours in {
        "attention.output_group_count": "o_groups", "attention.output_lora_rank": "o_lora_rank",
        "hyper_connection.count": "hc_mult", "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
        "hash_layer_count": "num_hash_layers",
    }.items():  # fmt: skip
        writer.add_uint32(f"deepseek4.{key}", config[ours])
    writer.add_array("deepseek4.attention.compress_ratios", config["compress_ratios"])
    writer.add_float32("deepseek4.attention.compress_rope_freq_base", config["compress_rope_theta"])
    writer.add_float32("deepseek4.hyper_connection.epsilon", config["hc_eps"])


def bailing_names(arrays: Arrays, config: Config) -> Arrays:
    return {name.replace("expert_bias", "expert_bias.bias"): array for name, array in arrays.items()}


CONVERTED = {
    "deepseek_v4": Converted("deepseek4", v4_keys, v4_names, table="deepseek2"),
    "exaone_moe": Converted("exaone-moe", exaone_moe_keys, exaone_moe_names, modules=1),
    "hy_v3": Converted("hy-v3", sigmoid_keys, modules=1, table="exaone-moe"),
    "bailing_moe": Converted("bailingmoe2", sigmoid_keys, bailing_names, modules=1),
    "deepseek_v32": Converted("deepseek32", latent_keys, latent_names, modules=1, table="glm-dsa"),
    "glm_moe_dsa": Converted("glm-dsa", latent_keys, latent_names, modules=1),
    "gemma2": Converted("gemma2", gemma2_keys, gemma2_names),
    "step3p5": Converted("step35", step_keys, step_names, modules=3),
    "llama4": Converted("llama4", llama4_keys, llama4_names),
    "ernie4_5_moe": Converted("ernie4_5-moe", ernie_keys, ernie_names),
    "mimo_v2_flash": Converted("mimo2", mimo_v2_keys, mimo_v2_names, modules=3),
}


SAID: dict[str, Config] = {"deepseek_v4": {"compress_rates": None, "intermediate_size": 24},
        "gemma2": {"query_pre_attn_scalar": 16},
        "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
        "step3p5": {"num_key_value_heads": 2}}  # fmt: skip
"""What a family's files do not say, as llama.cpp takes it."""
NEWER = {
    "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "eh_proj": "nextn.eh_proj", "final_layernorm": "layer_output_norm",
    "pre_mlp_layernorm": "ffn_norm", "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head", "mlp.shared_mlp.gate_proj": "ffn_gate_shexp",
    "mlp.shared_mlp.up_proj": "ffn_up_shexp", "mlp.shared_mlp.down_proj": "ffn_down_shexp",
    "mlp.router.gate": "ffn_gate_inp", "mlp": "exp_probs_b",
}  # fmt: skip
"""Names of b11434 that the released package of the converter's tables does not have for every architecture."""


def new_name(names: gguf.TensorNameMap, name: str) -> str:
    if name.startswith(("blk.", "output", "token_embd")):  # of a converter with a table of its own
        return name
    if found := names.get_name(name, (".weight", ".bias")):
        return str(found)
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)(\.\w+)", name)
    assert match, name
    return f"blk.{match[1]}.{NEWER[match[2]]}{match[3]}"


def write_converted(path: Path, config: Config, arrays: Arrays, how: Converted) -> Path:
    """A GGUF file of a tiny model."""
    blocks = config["num_hidden_layers"] + how.modules
    table = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == (how.table or how.arch))
    names = gguf.get_tensor_name_map(table, blocks)
    writer = Writer(path, how.arch)
    for method, key in KEYS.items():
        getattr(writer, f"add_{method}")(config[key])
    writer.add_block_count(blocks)
    if how.modules:
        writer.add_nextn_predict_layers(how.modules)
    how.keys(writer, config)
    stacks: dict[str, dict[int, Any]] = {}
    for name, array in how.renamed(arrays, config).items():
        if match := re.search(r"\.experts\.(\d+)", name):
            stacks.setdefault(name.replace(match[0], ".experts"), {})[int(match[1])] = array
        else:
            writer.add_tensor(new_name(names, name), np.ascontiguousarray(array))
    for name, parts in stacks.items():
        stack = np.stack([each for _, each in sorted(parts.items())])
        writer.add_tensor(new_name(names, name), stack)
    add_vocabulary(writer, config["vocab_size"])
    return written(writer, path)


@pytest.mark.parametrize("family", CONVERTED)
def test_a_converted_file_says_the_same(family: str, tmp_path: Path) -> None:
    config, arrays = family_of(family).tiny(**SAID.get(family, {}))
    plain = model_at(write_model(tmp_path / "plain", config, arrays))
    found = model_at(write_converted(tmp_path / "model.gguf", config, arrays, CONVERTED[family]))
    assert float((logits_of(found) - logits_of(plain)).abs().max()) <= 1e-5
    if not CONVERTED[family].modules:
        return
    assert found.head and plain.head and replace(found.head.spec, layer=None) == replace(plain.head.spec, layer=None)
    for name in plain.weights.tensors:
        if name.startswith("mtp.") and not re.search(r"\.experts\.|\.kv_b_proj", name):  # files have them otherwise
            both = (each.weights.tensors[name].float32() for each in (found, plain))
            np.testing.assert_array_equal(*both, err_msg=name)
