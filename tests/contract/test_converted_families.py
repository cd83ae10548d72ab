"""Families with experts in GGUF files as written by llama.cpp b11434's converter: its table of names and its keys."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_files import in_rope_order, llama_tensors, stacked, write_file
from support import family_of, model_at
from test_checkpoints import logits_of
from tiny_models import write_model

from headstart.errors import ModelError
from headstart.formats.gguf import open_checkpoint
from headstart.formats.gguf_names import FOUND
from headstart.layers.ngram import hash_factors
from headstart.models.small import Arrays

Config = dict[str, Any]
KEYS = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
"""Keys of every file -> those of config.json."""
SIGMOID = gguf.ExpertGatingFuncType.SIGMOID.value


@dataclass(frozen=True)
class Converted:
    """`keys`: metadata beside KEYS; `renamed`: tensors under the names that the converter looks up; `modules`: MTP
    modules after the trunk's layers; `table`: the architecture whose table of names the released package has."""

    arch: str
    keys: Callable[[Config], Config]
    renamed: Callable[[Arrays, Config], Arrays] = lambda arrays, config: arrays
    modules: int = 0
    table: str = ""


def experts(c: Config, count: str, used: str = "num_experts_per_tok", inner: str = "moe_intermediate_size") -> Config:
    return {"expert_count": c[count], "expert_used_count": c[used], "expert_feed_forward_length": c[inner]}


def sliding(config: Config, pattern: list[bool]) -> Config:
    return {"attention.sliding_window": config["sliding_window"], "attention.sliding_window_pattern": pattern}


def mimo_v2_keys(config: Config) -> Config:
    return experts(config, "n_routed_experts") | sliding(config, [False, *[True] * 5]) | {
        "attention.head_count_kv": [1, *[2] * 5], "attention.value_length": config["v_head_dim"],
        "expert_weights_scale": float(config["routed_scaling_factor"]), "rope.dimension_count": 4,
        "rope.freq_base": 5e4, "rope.freq_base_swa": 300.0, "attention.value_scale": 0.707,
    }  # fmt: skip


def mimo_v2_names(arrays: Arrays, config: Config) -> Arrays:
    def new(name: str) -> str:
        name = re.sub(r"^model\.mtp\.layers\.(\d)", lambda m: f"model.layers.{int(m[1]) + 3}", name)
        name = name.replace("correction_bias", "correction.bias")
        return f"{name}.weight" if name.endswith("attention_sink_bias") else name

    return {new(name): array for name, array in arrays.items()}


def ernie_keys(config: Config) -> Config:
    return experts(config, "moe_num_experts", "moe_k") | {
        "interleave_moe_layer_step": 1, "leading_dense_block_count": config["moe_layer_start_index"],
        "expert_shared_count": config["moe_num_shared_experts"], "rope.freq_base": float(config["rope_theta"]),
        "expert_shared_feed_forward_length": config["intermediate_size"] // config["num_key_value_heads"],
    }  # fmt: skip


def ernie_names(arrays: Arrays, config: Config) -> Arrays:
    new = {name.replace("correction_bias", "correction.bias"): array.squeeze() for name, array in arrays.items()}
    return {name: array for name, array in new.items() if ".mtp_" not in name}


def llama4_keys(config: Config) -> Config:
    return experts(config, "num_local_experts", inner="intermediate_size") | {
        "feed_forward_length": config["intermediate_size_mlp"], "rope.freq_base": float(config["rope_theta"]),
        "interleave_moe_layer_step": config["interleave_moe_layer_step"], "rope.dimension_count": config["head_dim"],
    }  # fmt: skip


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


def step_keys(config: Config) -> Config:
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    return experts(config, "moe_num_experts", "moe_top_k") | sliding(config, slides) | {
        "attention.head_count": [6 if each else 4 for each in slides], "attention.head_count_kv": [2] * 6,
        "attention.value_length": config["head_dim"], "expert_shared_feed_forward_length": config["share_expert_dim"],
        "expert_weights_scale": float(config["moe_router_scaling_factor"]), "leading_dense_block_count": 1,
        "moe_every_n_layers": 1, "expert_weights_norm": True, "swiglu_clamp_exp": [0.0, 7.0, 0.0, 0.0, 0.0, 0.0],
        "rope.dimension_count": config["head_dim"], "rope.freq_base": 5e4, "rope.freq_base_swa": 300.0,
    }  # fmt: skip


def step_names(arrays: Arrays, config: Config) -> Arrays:
    def new(name: str) -> str:
        name = name.replace(".transformer.", ".").replace("shared_head.output", "shared_head.head")
        return f"{name}.bias" if name.endswith("router_bias") else name

    return {new(name): array + 1 if name.endswith("norm.weight") else array for name, array in arrays.items()}


def gemma2_keys(config: Config) -> Config:
    same = {key: float(config[key]) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return same | {"attention.value_length": config["head_dim"], "attention.sliding_window": config["sliding_window"]}


def gemma2_names(arrays: Arrays, config: Config) -> Arrays:
    return {name: array + 1 if name.endswith("norm.weight") else array for name, array in arrays.items()}


def muse_keys(config: Config) -> Config:
    return sliding(config, [False, True, True, True, False]) | {
        "attention.value_length": config["head_dim"], "logit_scale": config["output_multiplier"],
        "final_logit_softcapping": config["final_logit_softcapping"], "rope.dimension_count": config["head_dim"],
        "rope.freq_base": float(config["rope_theta"]),
    }  # fmt: skip


def muse_names(arrays: Arrays, config: Config) -> Arrays:
    found, heads = dict[str, Any](), {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for name, array in arrays.items():
        layer, part = (*name.split("."), "")[2], name.split(".")[-2]
        if part in heads:
            found[name] = in_rope_order(array, config[heads[part]])
            factor = config["qk_scale_factor"] if part == "q_proj" else 1.0
            found[f"blk.{layer}.attn_{part[0]}_norm.weight"] = np.full(config["head_dim"], factor, np.float32)
        elif name.endswith("self_attn.gate_proj.weight"):
            found[f"blk.{layer}.attn_gate.weight"] = array
        else:
            new = "output.weight" if part == "lm_head" else name
            found[new] = array + 1 if name.endswith("layernorm.weight") else array
    return found


def indexer(config: Config) -> Config:
    names = {"head_count": "index_n_heads", "key_length": "index_head_dim", "top_k": "index_topk"}
    return {f"attention.indexer.{key}": config[name] for key, name in names.items()}


def latent_keys(config: Config) -> Config:
    rank, rotary, kinds = config["kv_lora_rank"], config["qk_rope_head_dim"], config.get("indexer_types")
    return experts(config, "n_routed_experts") | indexer(config) | {
        "attention.head_count_kv": 1, "leading_dense_block_count": config["first_k_dense_replace"],
        "attention.q_lora_rank": config["q_lora_rank"], "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotary, "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": config["v_head_dim"], "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"], "expert_gating_func": SIGMOID, "expert_weights_norm": True,
        "expert_shared_count": config["n_shared_experts"], "rope.dimension_count": rotary,
        "expert_weights_scale": float(config["routed_scaling_factor"]), "rope.freq_base": float(config["rope_theta"]),
        "attention.indexer.types": [kind == "full" for kind in kinds] if kinds else None,
    }  # fmt: skip


def latent_names(arrays: Arrays, config: Config) -> Arrays:
    """kv_b_proj split into its two parts, the first transposed."""
    found, nope, value = dict[str, Any](), config["qk_nope_head_dim"], config["v_head_dim"]
    for name, array in arrays.items():
        if "kv_b_proj" in name:
            both = array.reshape(config["num_attention_heads"], nope + value, -1)
            found[name.replace("kv_b_proj", "k_b_proj")] = both[:, :nope].swapaxes(1, 2)
            found[name.replace("kv_b_proj", "v_b_proj")] = both[:, nope:]
        else:
            found[name.replace("correction_bias", "correction.bias")] = array
    return found


def sigmoid_keys(config: Config) -> Config:
    scale = config.get("router_scaling_factor") or config["routed_scaling_factor"]
    silent = config["model_type"] == "hy_v3"  # stated by tensors only
    return experts(config, "num_experts") | {
        "expert_shared_feed_forward_length": config["moe_intermediate_size"] * config["num_shared_experts"],
        "expert_shared_count": None if silent else config["num_shared_experts"],
        "expert_gating_func": SIGMOID, "expert_weights_norm": True, "expert_weights_scale": float(scale),
        "leading_dense_block_count": None if silent else config["first_k_dense_replace"],
        "expert_group_count": config.get("n_group", 1), "expert_group_used_count": config.get("topk_group", 1),
        "rope.dimension_count": int(config["head_dim"] * config.get("partial_rotary_factor", 1)),
        "rope.freq_base": float(config["rope_theta"]),
    }  # fmt: skip


def exaone_moe_keys(config: Config) -> Config:
    return sigmoid_keys(config) | sliding(config, [True, False, True]) | {"rope.scaling.type": "none"}


def exaone_moe_names(arrays: Arrays, config: Config) -> Arrays:
    norms = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
    parts, found = {"fc": "eh_proj", **norms}, {}
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
    for name, array in stacked(arrays).items():
        short = name
        for old, new in V4_NAMES.items():
            short = re.sub(old, new, short)
        if not name.startswith("mtp."):
            found[short] = array.astype(np.int32) if "tid2eid" in name else array
    return found


def v4_keys(config: Config) -> Config:
    same = {
        "attention.output_group_count": "o_groups", "attention.output_lora_rank": "o_lora_rank",
        "hyper_connection.count": "hc_mult", "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
        "hash_layer_count": "num_hash_layers", "attention.compress_ratios": "compress_ratios",
        "rope.dimension_count": "qk_rope_head_dim", "attention.q_lora_rank": "q_lora_rank",
        "attention.sliding_window": "sliding_window", "expert_shared_count": "n_shared_experts",
        "hyper_connection.epsilon": "hc_eps",
    }  # fmt: skip
    return experts(config, "n_routed_experts") | indexer(config) | {key: config[ours] for key, ours in same.items()} | {
        "rope.freq_base": float(config["rope_theta"]), "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": True, "expert_gating_func": 4, "swiglu_clamp_exp": [10.0] * 3,
        "swiglu_clamp_shexp": [10.0] * 3, "attention.compress_rope_freq_base": float(config["compress_rope_theta"]),
    }  # fmt: skip


def bailing_names(arrays: Arrays, config: Config) -> Arrays:
    return {name.replace("expert_bias", "expert_bias.bias"): array for name, array in arrays.items()}


def flash_keys(config: Config) -> Config:
    ratio, rotary = config["indexer_compress_ratio"], int(config["head_dim"] * config["partial_rotary_factor"])
    sizes = [61, 67, 71, 73]
    return experts(config, "num_experts") | {
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"], "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"], "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_num_value_heads"] * config["linear_value_head_dim"],
        "attention.recurrent_layers": [True, False, True, False], "full_attention_interval": 4,
        "rope.dimension_count": rotary, "rope.freq_base": float(config["rope_theta"]),
        "rope.dimension_sections": [2, 1, 1, 0], "hyper_connection.count": config["hc_count"],
        "hyper_connection.low_rank": config["hc_lowrank"], "attention.compress_ratios": [0, ratio, 0, ratio],
        "attention.indexer.head_count": config["indexer_n_heads"],
        "attention.indexer.key_length": config["indexer_head_dim"], "attention.indexer.top_k": config["indexer_budget"],
        "ple.layers": [0], "ple.ngram_size": config["ngram_size"], "ple.heads_per_ngram": config["heads_per_ngram"],
        "ple.conv_kernel": config["ple_conv_kernel_size"], "ple.eos_token_id": config["eos_token_id"],
        "ple.image_token_id": 5, "embedding_length_per_layer_input": 6,
        "ple.layer_multipliers": np.array(hash_factors(config["vocab_size"], config["ngram_size"], 1234), np.uint64),
        "ple.head_vocab_sizes": np.array(sizes, np.uint64),
        "ple.head_offsets": np.cumsum([0, *sizes[:-1]]).astype(np.uint64),
    }  # fmt: skip


FLASH = {
    r"^mtp\.layers\.0\.": "blk.3.", r"^mtp\.hyper_connection_mixer": "blk.3.nextn.hc_head",
    r"^model\.hyper_connection_mixer": "output_hc", r"^model\.layers\.": "blk.", r"attn_hyper_connection": "hc_attn",
    r"mlp_hyper_connection": "hc_ffn", r"\.hc_norm": "_norm", r"\.input_mix_weight_": "_",
    r"\.block_(inject)_weight": r"_\1", r"\.ple\.(key|value)_proj": r".ple_\1",
    r"blk\.0\.ple\.ple_embedding\.ngram_embedding": "per_layer_token_embd", r"\.ple\.": ".ple_",
    r"self_attn\.indexer\.(.)_layernorm": r"indexer.\1_norm",
}  # fmt: skip
"""What Qwen3.8-Flash-Next has beside Qwen3.5's tensors."""


def flash_names(arrays: Arrays, config: Config) -> Arrays:
    found, rest, fused = dict[str, Any](), dict[str, Any](), []
    for name, array in arrays.items():
        new = name
        for old, ours in FLASH.items():
            new = re.sub(old, ours, new)
        if ".fc_" in f".{name}":
            fused.append(array)
        elif "index_qk_proj" in name:
            split = config["indexer_n_heads"] * config["indexer_head_dim"]
            for part, rows in (("q", array[:split]), ("k", array[split:])):
                found[f"{new.split('.self_attn')[0]}.indexer.{part}_proj.weight"] = rows
        elif re.search(r"hyper_conn|\.ple\.|indexer", name):
            found[new] = array.squeeze() + (1 if "norm" in name else 0)
        else:
            rest[name] = array
    found["blk.3.nextn.eh_proj.weight"] = np.concatenate(fused, 1)
    return found | llama_tensors({**config, "model_type": "qwen3_5_moe_text"}, rest)


CONVERTED = {
    "qwen4_exp": Converted("qwen4exp", flash_keys, flash_names, modules=1, table="qwen35moe"),
    "deepseek_v4": Converted("deepseek4", v4_keys, v4_names, table="deepseek2"),
    "exaone_moe": Converted("exaone-moe", exaone_moe_keys, exaone_moe_names, modules=1),
    "hy_v3": Converted("hy_v3", sigmoid_keys, modules=1, table="exaone-moe"),
    "bailing_moe": Converted("bailingmoe2", sigmoid_keys, bailing_names, modules=1),
    "deepseek_v32": Converted("deepseek32", latent_keys, latent_names, modules=1, table="glm-dsa"),
    "glm_moe_dsa": Converted("glm-dsa", latent_keys, latent_names, modules=1),
    "gemma2": Converted("gemma2", gemma2_keys, gemma2_names),
    "muse_glimmer": Converted("muse-glimmer", muse_keys, muse_names, table="gemma2"),
    "step3p5": Converted("step35", step_keys, step_names, modules=3),
    "llama4": Converted("llama4", llama4_keys, llama4_names),
    "ernie4_5_moe": Converted("ernie4_5-moe", ernie_keys, ernie_names),
    "mimo_v2_flash": Converted("mimo2", mimo_v2_keys, mimo_v2_names, modules=3),
}


GGUF_CHANGES: dict[str, Config] = {
    "deepseek_v4": {"compress_rates": None, "intermediate_size": 24}, "gemma2": {"query_pre_attn_scalar": 16},
    "hy_v3": {"first_k_dense_replace": 2},  # stated by tensors only
    "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    "muse_glimmer": {"post_norm_eps": 1e-8}, "step3p5": {"num_key_value_heads": 2},
}  # fmt: skip
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
    if name.startswith(("blk.", "output", "token_embd", "per_layer")):  # converters with a table of their own
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
    metadata = {key: config[ours] for key, ours in KEYS.items()} | how.keys(config) | {"block_count": blocks}
    metadata["nextn_predict_layers"] = how.modules or None
    tensors = {new_name(names, name): array for name, array in stacked(how.renamed(arrays, config)).items()}
    return write_file(path, how.arch, metadata, tensors, config["vocab_size"])


@pytest.mark.parametrize("family", CONVERTED)
def test_converted_file_equals_the_checkpoint(family: str, tmp_path: Path) -> None:
    config, arrays = family_of(family).tiny(**GGUF_CHANGES.get(family, {}))
    plain = model_at(write_model(tmp_path / "plain", config, arrays))
    found = model_at(write_converted(tmp_path / "model.gguf", config, arrays, CONVERTED[family]))
    assert float((logits_of(found) - logits_of(plain)).abs().max()) <= 1e-5
    if not CONVERTED[family].modules:
        return
    assert found.head and plain.head and replace(found.head.spec, layer=None) == replace(plain.head.spec, layer=None)
    for name in plain.weights.tensors:
        if name.startswith("mtp.") and not re.search(r"\.experts\.|\.kv_b_proj", name):  # stored in another form
            both = (each.weights.tensors[name].float32() for each in (found, plain))
            np.testing.assert_array_equal(*both, err_msg=name)


@pytest.mark.parametrize(
    "changes",
    [
        {"ple_head_offsets": [0, 61, 128, 200]}, {"ple_head_vocab_sizes": [61, 67, 71, 500]}, {"ple_layers": [0, 2]},
        {"ple_layers": 0.5}, {"ple_layer_multipliers": [1, 3]}, {"ple_layer_multipliers": [1, 3, 1 << 63]},
        {"compress_ratios": [0, 3, 0, 4]}, {"vocab_size_per_layer_input": None}, {"ngram_size": 17},
    ],
)  # fmt: skip
def test_invalid_ngram_hashes_are_refused(changes: Config, tmp_path: Path) -> None:
    family = family_of("qwen4_exp")
    path = write_converted(tmp_path / "model.gguf", *family.tiny(), CONVERTED["qwen4_exp"])
    config = open_checkpoint(path).config
    family.read(config, beside=FOUND)
    with pytest.raises(ModelError):
        family.read({**config, **changes}, beside=FOUND)
