"""Tiny hybrid models in the forms that people have them in: a multimodal wrapper, GGUF; and broken ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support import family_of, make, prompt_of
from test_families import logits_in_chunks
from torch import Tensor

from headstart.config import EngineConfig
from headstart.engine.load import Model, load_model
from headstart.errors import ModelError
from headstart.models.small import Arrays
from headstart.tools.tiny import write_model

TOKENS = prompt_of(50, 1)
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
Tiny = tuple[dict[str, Any], Arrays]


def model_at(path: Path) -> Model:
    return load_model(str(path), EngineConfig(backend="reference", dtype="float32", threads=1))


def logits_of(model: Model) -> Tensor:
    return logits_in_chunks(make(model, dtype="float32", drafter="none"), TOKENS, 40, 1)


@pytest.fixture(params=FAMILIES)
def tiny(request: pytest.FixtureRequest) -> Tiny:
    return family_of(request.param).tiny()


@pytest.mark.slow
def test_the_text_part_of_a_wrapper(tiny: Tiny, tmp_path: Path) -> None:
    """Sizes below text_config, tensors below model.language_model, and a vision part that is not the model's."""
    config, arrays = tiny
    outside = ("model_type", "architectures", "tie_word_embeddings", "eos_token_id", "torch_dtype")
    inner = {key: value for key, value in config.items() if key not in outside}
    wrapper = {key: config[key] for key in outside} | {
        "model_type": config["model_type"].removesuffix("_text"),
        "text_config": {**inner, "model_type": config["model_type"]},
        "vision_config": {"hidden_size": 8, "num_hidden_layers": 1},
        "vocab_size": config["vocab_size"],
    }
    named = {name.replace("model.", "model.language_model.", 1): array for name, array in arrays.items()}
    named["model.visual.blocks.0.norm1.weight"] = np.ones(8, np.float32)
    expected = model_at(write_model(tmp_path / "plain", config, arrays))
    found = model_at(write_model(tmp_path / "wrapper", wrapper, named))
    assert found.config == expected.config
    assert found.head is not None
    assert float((logits_of(found) - logits_of(expected)).abs().max()) <= 1e-5


def test_two_mtp_layers_share_the_projection(tmp_path: Path) -> None:
    """Draft step i runs layer i % 2, each with its own block."""
    config, arrays = family_of("qwen3_5").tiny(mtp_num_hidden_layers=2)
    model = model_at(write_model(tmp_path, config, arrays))
    assert model.head is not None
    first, second = model.head.modules
    assert model.head.spec.num_modules == 2
    assert (first.projection.weight == second.projection.weight).all()
    assert not (first.block.input_norm.weight == second.block.input_norm.weight).all()


# llama.cpp.

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "self_attn.o_proj": "attn_output", **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"},
    **{f"self_attn.{n}_norm": f"attn_{n}_norm" for n in "qk"},
    **{f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}, "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_expert.{n}_proj": f"ffn_{n}_shexp" for n in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.A_log": "ssm_a",
}  # fmt: skip
TOP = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm", "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm",
}  # fmt: skip
ARCH = {"qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe", "qwen3_next": "qwen3next"}


def tiled(array: Any, config: dict[str, Any], axis: int, head_dim: int) -> Any:
    """Value heads from the order of their key heads to llama.cpp's: the first of each key head, then the second."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    shape = array.shape
    parts = array.reshape(*shape[:axis], keys, heads // keys, head_dim, *shape[axis + 1 :])
    return np.ascontiguousarray(parts.swapaxes(axis, axis + 1)).reshape(shape)


def reordered(part: str, array: Any, config: dict[str, Any]) -> Any:
    """What llama.cpp's converter does to a linear layer of Qwen3.5."""
    value, keys = config["linear_value_head_dim"], 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate((array[:keys], tiled(array[keys:], config, 0, value)))
    if part == "in_proj_z.weight":
        return tiled(array, config, 0, value)
    if part == "out_proj.weight":
        return tiled(array, config, 1, value)
    return array if part == "norm.weight" else tiled(array, config, 0, 1)


def split_qkvz(array: Any, config: dict[str, Any]) -> tuple[Any, Any]:
    """Qwen3-Next's joint projection -> [q, k, v] and z, each by head."""
    keys, per_key = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    key, value = config["linear_key_head_dim"], per_key * config["linear_value_head_dim"]
    q, k, v, z = np.split(array.reshape(keys, -1, array.shape[1]), np.cumsum([key, key, value]), axis=1)
    q, k, v, z = (np.ascontiguousarray(each).reshape(-1, array.shape[1]) for each in (q, k, v, z))
    return np.concatenate((q, k, v)), z


def llama_tensors(config: dict[str, Any], arrays: Arrays) -> Arrays:
    """Names, folded norms and orders of llama.cpp's converter."""
    found: Arrays = {}
    stacks: dict[str, list[Any]] = {}
    last = config["num_hidden_layers"]
    for name, array in arrays.items():
        if "norm" in name and "linear_attn" not in name:
            array = array + 1
        stem, _, end = name.rpartition(".")
        if stem in TOP:
            found[f"{f'blk.{last}.' if stem.startswith('mtp') else ''}{TOP[stem]}.{end}"] = array
            continue
        layer, part = name.removeprefix("model.layers.").split(".", 1)
        if name.startswith("mtp."):
            layer, part = str(last), name.removeprefix("mtp.layers.0.")
        if ".experts." in name:
            kind = part.split(".")[3].removesuffix("_proj")
            stacks.setdefault(f"blk.{layer}.ffn_{kind}_exps.weight", []).append(array)
            continue
        if part == "linear_attn.in_proj_qkvz.weight":
            found[f"blk.{layer}.attn_qkv.weight"], found[f"blk.{layer}.attn_gate.weight"] = split_qkvz(array, config)
            continue
        if part.startswith("linear_attn.") and config["model_type"] != "qwen3_next":
            array = reordered(part.removeprefix("linear_attn."), array, config)
        if part == "linear_attn.A_log":
            array = -np.exp(array)
        bare = part.removesuffix(".weight")
        llama = NAMES[bare] + (".weight" if bare != part else "")
        found[f"blk.{layer}.{llama}"] = array[:, 0] if "conv1d" in part else array
    return found | {name: np.stack(parts) for name, parts in stacks.items()}


def write_gguf(path: Path, config: dict[str, Any], arrays: Arrays, *, listed: bool) -> Path:
    """`listed`: which layers are recurrent is written one by one, as newer converters do."""
    writer = gguf.GGUFWriter(path, ARCH[config["model_type"]])
    layers = config["num_hidden_layers"]
    writer.add_block_count(layers + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(int(config["head_dim"] * config["partial_rotary_factor"]))
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    arch, every = ARCH[config["model_type"]], config["full_attention_interval"]
    if listed:
        writer.add_array(f"{arch}.attention.recurrent_layers", [(i + 1) % every != 0 for i in range(layers)] + [False])
    else:
        writer.add_uint32(f"{arch}.full_attention_interval", every)
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["a", "b", "ab", *(f"<{i}>" for i in range(3, config["vocab_size"]))])
    writer.add_token_merges(["a b"])
    for name, array in llama_tensors(config, arrays).items():
        writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.slow
@pytest.mark.parametrize("listed", [True, False])
def test_llama_cpp_files(tiny: Tiny, tmp_path: Path, listed: bool) -> None:
    plain = model_at(write_model(tmp_path / "plain", *tiny))
    found = model_at(write_gguf(tmp_path / "model.gguf", *tiny, listed=listed))
    assert float((logits_of(found) - logits_of(plain)).abs().max()) <= 2e-5
    assert plain.head is not None
    assert found.head is not None
    assert replace(found.head.spec, layer=None) == replace(plain.head.spec, layer=None)  # eps is float32 in the file
    ours, theirs = ({n: t for n, t in m.weights.tensors.items() if n.startswith("mtp.")} for m in (found, plain))
    for name in (n for n in theirs if ".experts." not in n):
        np.testing.assert_array_equal(ours[name].float32(), theirs[name].float32(), err_msg=name)


# Bad input: one clear line.

BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "another number of value heads": (
        "qwen3_5", {"linear_num_value_heads": 4},
        r"in_proj_a.weight has shape \(6, 48\), but the config implies \(4, 48\)",
    ),
    "another kind of layer": ("qwen3_5", {"layer_types": ["full_attention"] * 3}, "has no tensor layers.0.self_attn"),
    "another kind of layer, joined": (
        "qwen3_next", {"layer_types": ["full_attention"] * 3}, "has no tensor layers.0.self_attn",
    ),
    "an unknown kind of layer": (
        "qwen3_5", {"layer_types": ["mamba"] * 3}, "layer type 'mamba' is not supported",
    ),
    "too few kinds": ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types must name 3 layers"),
    "heads that do not divide": ("qwen3_next", {"linear_num_key_heads": 4}, "6 value heads of 8, 4 key heads"),
    "no convolution": ("qwen3_5", {"linear_conv_kernel_dim": 1}, "a convolution of 1"),
    "a size that is missing": ("qwen3_5", {"linear_key_head_dim": None}, "linear attention needs it"),
    "more modules than there are": (
        "qwen3_5", {"mtp_num_hidden_layers": 2}, "promises 2 MTP modules, but .* holds 1",
    ),
    "another activation": ("qwen3_5", {"hidden_act": "selu"}, "hidden_act is 'selu'"),
    "an embedding of its own": ("qwen3_5", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
    "no gate": ("qwen3_5", {"attn_output_gate": False}, r"q_proj.weight has shape \(192, 48\)"),
    "more experts than there are": ("qwen3_5_moe", {"num_experts_per_tok": 9}, "cannot take 9 of 7 experts"),
    "experts that are missing": ("qwen3_next", {"num_experts": 9}, r"gate.weight has shape \(7, 48\)"),
    "a wrapper around nothing": ("qwen3_5", {"text_config": "none"}, "text_config is not an object"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_configs_that_contradict(case: str, tmp_path: Path) -> None:
    family, changes, message = BAD[case]
    config, arrays = family_of(family).tiny()
    with pytest.raises(ModelError, match=message):
        model_at(write_model(tmp_path, config | changes, arrays))


@pytest.mark.parametrize("name", ["conv1d.weight", "dt_bias", "A_log", "norm.weight", "in_proj_qkv.weight"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    config, arrays = family_of("qwen3_5").tiny()
    del arrays[f"model.layers.2.linear_attn.{name}"]
    with pytest.raises(ModelError, match=r"has no tensor layers\.2\.linear_attn\."):
        model_at(write_model(tmp_path, config, arrays))


def test_a_checkpoint_without_its_mtp_is_a_plain_model(tiny: Tiny, tmp_path: Path) -> None:
    config, arrays = tiny
    trunk = {name: array for name, array in arrays.items() if not name.startswith("mtp.")}
    assert model_at(write_model(tmp_path, config, trunk)).head is None
