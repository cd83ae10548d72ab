"""GGUF files of families with Mamba2: the tables restate llama.cpp's
`conversion/{mamba,granite,nemotron,falcon_h1}.py`, whose output gave the same logits when this test was written."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import in_rope_order, stacked, write_file
from support import family_of, make, model_at, new_folder, prompt_of, request, run
from test_families import logits_in_chunks
from tiny_models import write_model

from headstart.models.small import Arrays

Config = dict[str, Any]
RENAMED = {
    r"model\.embed_tokens|backbone\.embeddings": "token_embd",
    r"model\.(final_layer)?norm|backbone\.norm_f": "output_norm", r"lm_head": "output",
    r"mtp\.layers\.0\.(enorm|hnorm|eh_proj)": r"blk.{last}.nextn.\1",
    r"mtp\.layers\.1\.final_layernorm": "blk.{last}.nextn.shared_head_norm",
    r"mtp\.layers\.1\.norm": "blk.{last}.post_attention_norm",
}  # fmt: skip
PARTS = {
    r"(input_layer)?norm": "attn_norm", r"post_attention_layernorm": "ffn_norm",
    r"(?:self_attn|mixer)\.([qkv])_proj": r"attn_\1", r"(?:self_attn|mixer)\.o_proj": "attn_output",
    r"(?:mamba|mixer)\.in_proj": "ssm_in", r"(?:mamba|mixer)\.out_proj": "ssm_out",
    r"(?:mamba|mixer)\.conv1d": "ssm_conv1d", r"(?:mamba|mixer)\.norm": "ssm_norm",
    r"block_sparse_moe\.router\.layer|mixer\.gate": "ffn_gate_inp", r"block_sparse_moe\.output_linear": "ffn_down_exps",
    r"shared_mlp\.output_linear": "ffn_down_shexp", r"mixer\.shared_experts\.(up|down)_proj": r"ffn_\1_shexp",
    r"mixer\.fc1_latent_proj": "ffn_latent_down", r"mixer\.fc2_latent_proj": "ffn_latent_up",
    r"mixer\.experts\.(up|down)_proj": r"ffn_\1_exps",
    r"(?:feed_forward|mixer)\.(gate|up|down)_proj": r"ffn_\1",
}  # fmt: skip
WHOLE = {
    r"(?:mamba|mixer)\.dt_bias": "ssm_dt.bias", r"(?:mamba|mixer)\.A_log": "ssm_a", r"(?:mamba|mixer)\.D": "ssm_d",
    r"mixer\.gate\.e_score_correction_bias": "exp_probs_b.bias", r"pre_ff_layernorm\.weight": "ffn_norm",
}  # fmt: skip
"""Names with their ends."""
JOINED = {"block_sparse_moe.input_linear": "exps", "shared_mlp.input_linear": "shexp"}


def gguf_name(name: str, last: int) -> str:
    """The converter's name of a Hugging Face tensor; `last` is the block of the MTP module."""
    stem, _, end = name.rpartition(".")
    for old, new in RENAMED.items():
        if match := re.fullmatch(old, stem):
            return f"{match.expand(new).format(last=last)}.{end}"
    match = re.fullmatch(r"(?:(?:model|backbone)\.layers\.(\d+)|mtp\.layers\.[01])\.(.+)", name)
    assert match, name
    block, rest = f"blk.{match[1] or last}", match[2]
    for old, new in WHOLE.items():
        if re.fullmatch(old, rest):
            return f"{block}.{new}"
    for old, new in PARTS.items():
        if found := re.fullmatch(old, rest.rpartition(".")[0]):
            return f"{block}.{found.expand(new)}.{end}"
    raise AssertionError(name)


def converted_tensors(config: Config, arrays: Arrays, last: int) -> Iterator[tuple[str, np.ndarray]]:
    groups = config.get("mamba_n_groups") or config["n_groups"]
    for name, array in stacked(scaled(config, arrays)).items():
        stem = name.removesuffix(".weight").partition(".layers.")[2].partition(".")[2]
        if stem in JOINED:
            block = f"blk.{name.split('.')[2]}"
            for part, half in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
                yield f"{block}.ffn_{part}_{JOINED[stem]}.weight", half
            continue
        if config["model_type"] == "granitemoehybrid" and (match := re.search(r"\.([qk])_proj\.", name)):
            array = in_rope_order(array, config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])
        if name.endswith((".A_log", ".D")):
            array = (-np.exp(array) if name.endswith("A_log") else array)[:, None]
        elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
            array = array.reshape(groups, -1)
        yield gguf_name(name, last), array[:, 0] if name.endswith("conv1d.weight") else array


def scaled(config: Config, arrays: Arrays) -> Arrays:
    """Falcon-H1's multipliers applied to its matrices."""
    if config["model_type"] != "falcon_h1":
        return arrays
    inner, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = (inner, inner, keys, keys, config["mamba_n_heads"])
    read, gate_down = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors = {
        "mamba.in_proj": np.repeat(config["ssm_multipliers"], sizes)[:, None] * config["ssm_in_multiplier"],
        "mamba.out_proj": config["ssm_out_multiplier"], "feed_forward.gate_proj": gate_down[0],
        "feed_forward.down_proj": gate_down[1], "q_proj": read, "k_proj": read * config["key_multiplier"],
        "v_proj": read, "o_proj": config["attention_out_multiplier"], "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }  # fmt: skip
    ends = {f"{name}.weight": factor for name, factor in factors.items()}
    return {
        name: array * np.float32(next((factor for end, factor in ends.items() if name.endswith(end)), 1))
        for name, array in arrays.items()
    }


SIZES = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "context_length": "max_position_embeddings", "rope.freq_base": "rope_theta",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}  # fmt: skip
MAMBA = {
    "ssm.conv_kernel": ("mamba_d_conv", "conv_kernel"), "ssm.state_size": ("mamba_d_state", "ssm_state_size"),
    "ssm.group_count": ("mamba_n_groups", "n_groups"), "ssm.time_step_rank": ("mamba_n_heads", "mamba_num_heads"),
}  # fmt: skip


def metadata(config: Config) -> Config:
    """Metadata below `{arch}.` as the converter writes them."""
    keys = {key: config.get(name) for key, name in SIZES.items()}
    keys |= {key: config.get(first, config.get(second)) for key, (first, second) in MAMBA.items()}
    keys["ssm.inner_size"] = keys["ssm.time_step_rank"] * (config.get("mamba_d_head") or config.get("mamba_head_dim"))
    kv_heads = config["num_key_value_heads"]
    if config["model_type"] == "granitemoehybrid":
        kinds = config["layer_types"]
        return keys | {
            "attention.head_count_kv": [kv_heads if kind == "full_attention" else 0 for kind in kinds],
            "attention.scale": config["attention_multiplier"], "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"], "logit_scale": config["logits_scaling"],
            "expert_count": config["num_local_experts"], "expert_used_count": config["num_experts_per_tok"],
            "expert_shared_feed_forward_length": config["shared_intermediate_size"], "rope.scaling.finetuned": False,
        }  # fmt: skip
    if config["model_type"] == "falcon_h1":
        return keys
    pattern = config["hybrid_override_pattern"] + "2" * config["num_nextn_predict_layers"]  # "2": both parts
    keys["block_count"], keys["nextn_predict_layers"] = len(pattern), config["num_nextn_predict_layers"]
    keys["attention.head_count_kv"] = [kv_heads if kind in "*2" else 0 for kind in pattern]
    keys["attention.layer_norm_epsilon"] = config["layer_norm_epsilon"]
    if "E" not in pattern:
        return keys | {"feed_forward_length": [config["intermediate_size"] if k == "-" else 0 for k in pattern]}
    inner = config["moe_intermediate_size"]
    return keys | {
        "feed_forward_length": [inner if kind in "E2" else 0 for kind in pattern],
        "expert_feed_forward_length": inner, "expert_count": config["n_routed_experts"], "expert_group_count": 1,
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"], "expert_shared_count": 1,
        "expert_used_count": config["num_experts_per_tok"], "expert_weights_norm": True,
        "expert_weights_scale": config["routed_scaling_factor"], "moe_latent_size": config["moe_latent_size"],
    }  # fmt: skip


def write_gguf(path: Path, arch: str, config: Config, arrays: Arrays) -> Path:
    tensors = converted_tensors(config, arrays, len(config.get("hybrid_override_pattern", "")))
    return write_file(path, arch, metadata(config), dict(tensors), config["vocab_size"])


CASES: dict[str, tuple[str, str, Config]] = {
    "granite": ("granitemoehybrid", "granitehybrid", {}),
    "falcon": ("falcon_h1", "falcon-h1", {}),
    "falcon, no norm": ("falcon_h1", "falcon-h1", {"mamba_rms_norm": False}),
    "nemotron, experts": ("nemotron_h", "nemotron_h_moe", {"hybrid_override_pattern": "ME*EM"}),
    "nemotron, dense": ("nemotron_h", "nemotron_h", {"hybrid_override_pattern": "M-*M", "num_nextn_predict_layers": 0}),
}


@pytest.mark.parametrize("case", CASES)
def test_converted_file_equals_the_checkpoint(case: str, tmp_path: Path) -> None:
    family, arch, changes = CASES[case]
    config, arrays = family_of(family).tiny(**changes)
    paths = (write_model(new_folder(), config, arrays), write_gguf(tmp_path / "model.gguf", arch, config, arrays))
    models, tokens = [model_at(path) for path in paths], prompt_of(30, 5)
    logits = [logits_in_chunks(make(each, dtype="float32", drafter="none"), tokens, 30, 1) for each in models]
    assert float((logits[0] - logits[1]).abs().max()) <= 1e-5
    if config.get("num_nextn_predict_layers"):
        drafting = [make(each, dtype="float32", drafter="mtp", depth=2) for each in models]
        texts = [run(each, [request(tokens, max_tokens=40, stops=())])["r", 0].tokens for each in drafting]
        assert texts[0] == texts[1] and len({(each.stats.drafted, each.stats.accepted) for each in drafting}) == 1
