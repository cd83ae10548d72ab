"""Families that are Llama's layers with declared differences: each against transformers' own class, through both
backends, with and without drafts, and from files as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import add_vocabulary, written
from support import RELATIVES, family_of, make, new_folder, prompt_of, request, run
from test_families import behind, logits_in_chunks, oracle_of

from headstart.config import EngineConfig
from headstart.engine.load import Model, load_model
from headstart.models.small import Arrays
from headstart.tools.tiny import write_model

Config = dict[str, Any]
LENGTH, NEW = 70, 100
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 5.0],
    "original_max_position_embeddings": 256,
}  # fmt: skip
VARIANTS: dict[str, Config] = {
    **{name: {"model_type": name} for name in RELATIVES},
    "mistral, no window": {"model_type": "mistral", "sliding_window": None},
    "ministral": {"model_type": "ministral", "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "ministral3": {
        "model_type": "ministral3", "sliding_window": None, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
    "mixtral, window": {"model_type": "mixtral", "sliding_window": 9},
    "qwen2_moe, windows": {
        "model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2,
        "mlp_only_layers": [1],
    },
    "phi3, a part of each head": {"model_type": "phi3", "partial_rotary_factor": 0.75, "sliding_window": None},
    "phi3, longrope": {
        "model_type": "phi3", "partial_rotary_factor": 0.75, "rope_scaling": LONGROPE,
        "original_max_position_embeddings": 256,
    },
    "olmo3": {"model_type": "olmo3", "sliding_window": 9, "num_hidden_layers": 4, "rope_theta": 5e5},
    "olmo3, scaled": {
        "model_type": "olmo3", "sliding_window": 9, "num_hidden_layers": 4, "rope_theta": 5e5, "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.2,
        },
    },
    "olmo3, a rope for each kind": {
        "model_type": "olmo3", "sliding_window": 9, "num_hidden_layers": 4, "rope_theta": 5e5, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "glm, no biases": {"model_type": "glm", "attention_bias": False},
    "exaone4": {"model_type": "exaone4", "num_nextn_predict_layers": 0},  # EXAONE 4.5 has one
    "mellum, windows, an MLP": {
        "model_type": "mellum", "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "num_nextn_predict_layers": 0,
    },
    "exaone4, no windows": {
        "model_type": "exaone4", "num_nextn_predict_layers": 0, "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
    },
    "gemma3n": {"model_type": "gemma3n", "laurel_rank": 64, "vocab_size_per_layer_input": 131},  # as GGUF files say
    "gemma3n, fewer tokens by layer, another stream, no factor": {
        "model_type": "gemma3n", "altup_active_idx": 1, "altup_correct_scale": False, "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": None, "attention_bias": True, "intermediate_size": 80,
    },
    "granite, biases": {"model_type": "granite", "attention_bias": True, "mlp_bias": True},
    "granitemoehybrid, older names, rope, a dense part": {
        "model_type": "granitemoehybrid", "layer_types": ["attention", "mamba", "mamba"], "num_local_experts": 0,
        "position_embedding_type": "rope", "mamba_n_groups": 1, "mamba_proj_bias": True, "mamba_conv_bias": False,
    },
    "falcon_h1, no norm, biases": {
        "model_type": "falcon_h1", "mamba_rms_norm": False, "mamba_proj_bias": True, "projectors_bias": True,
        "attention_bias": True, "mlp_bias": True, "mamba_n_groups": 1,
    },
    "falcon_h1, norm before the gate, no multipliers": {
        "model_type": "falcon_h1", "mamba_norm_before_gate": True, "mlp_multipliers": None, "ssm_multipliers": None,
        "key_multiplier": 1.0, "ssm_in_multiplier": 1.0, "attention_in_multiplier": 1.0,
    },
    "granitemoe": {"model_type": "granitemoe", "layer_types": None, "shared_intermediate_size": None},
    "granitemoeshared": {"model_type": "granitemoeshared", "layer_types": None},
    "seed_oss, all biases": {"model_type": "seed_oss", "attention_out_bias": True, "mlp_bias": True},
    "ernie4_5, biases": {"model_type": "ernie4_5", "use_bias": True},
    "hunyuan_v1_dense, alpha": {
        "model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "llama4, one expert, no norms": {
        "model_type": "llama4_text", "num_experts_per_tok": 1, "use_qk_norm": False, "no_rope_layers": [1, 0, 1, 0],
        "moe_layers": [0, 3],
    },
    "llama4, scaled": {
        "model_type": "llama4_text", "attn_temperature_tuning": False, "attention_bias": True, "rope_scaling": {
            "rope_type": "llama3", "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 32,
        },
    },
    "cohere2_moe, a softmax, no shared experts, a norm that does not center": {
        "model_type": "cohere2_moe", "rms_norm_eps": 1e-5, "expert_selection_fn": "softmax", "num_shared_experts": 0,
        "first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2, "num_hidden_layers": 4,
        "prefix_dense_intermediate_size": None, "num_nextn_predict_layers": 0,
    },
    "stablelm, both parts beside each other": {
        "model_type": "stablelm", "use_parallel_residual": True, "use_qkv_bias": False, "partial_rotary_factor": 0.5,
    },
    "cohere2, biases": {"model_type": "cohere2", "attention_bias": True},
    "cohere": {"model_type": "cohere", "sliding_window": None, "sliding_window_pattern": None},
}  # fmt: skip
"""Families, and what else their configs say."""
FAMILY_OF = {
    "granitemoe": "granitemoehybrid", "granitemoeshared": "granitemoehybrid", "ministral": "mistral",
    "ministral3": "mistral", "olmo3": "olmo2", "cohere": "cohere2", "llama4_text": "llama4",
}  # fmt: skip
"""Other names of a family."""
ARCH = {
    "cohere2": "cohere2", "ernie4_5": "ernie4_5", "exaone4": "exaone4", "gemma3n": "gemma3n", "glm": "chatglm",
    "glm4": "glm4", "granite": "granite", "hunyuan_v1_dense": "hunyuan-dense", "minicpm": "minicpm", "mistral": "llama",
    "mixtral": "llama", "olmo2": "olmo2", "olmo3": "olmo2", "phi3": "phi3", "qwen2_moe": "qwen2moe",
    "seed_oss": "seed_oss", "stablelm": "stablelm",
}  # fmt: skip
"""model_type -> llama.cpp's architecture."""
PERMUTED = ("granite", "minicpm", "mistral", "mixtral")


@cache
def files_of(variant: str) -> tuple[str, Config, Arrays]:
    """A tiny random model, written: its folder, config and arrays."""
    changes = VARIANTS[variant]
    kind = changes["model_type"]
    config, arrays = family_of(FAMILY_OF.get(kind, kind)).tiny(**changes)
    return str(write_model(new_folder(), config, arrays)), config, arrays


@cache
def model_of(variant: str) -> Model:
    return load_model(files_of(variant)[0], EngineConfig(backend="reference", dtype="float32", threads=1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str) -> None:
    model, tokens = model_of(variant), prompt_of(LENGTH, 5)
    with torch.inference_mode():
        expected = oracle_of(VARIANTS[variant]["model_type"], model)(torch.tensor([tokens]), use_cache=False).logits[0]
    assert expected.std() > 0.3, "logits too small for the tolerance to mean anything"
    engine = make(model, dtype="float32", drafter="none")
    for first, chunk in ((LENGTH, 1), (7, 7)):
        found = logits_in_chunks(engine, tokens, first, chunk)
        assert float((found - expected).abs().max()) <= 2e-4, (first, chunk)


@pytest.mark.parametrize(
    "variant", [pytest.param(each, marks=() if each in RELATIVES else pytest.mark.slow) for each in VARIANTS]
)
def test_text_is_that_of_transformers_through_both_backends(variant: str) -> None:
    """Greedy, with lookup drafts and without, in company and in chunks."""
    pytest.importorskip("headstart.kernels.native._native")
    model, prompt = model_of(variant), prompt_of(12, 8) * 2
    oracle, expected = oracle_of(VARIANTS[variant]["model_type"], model), list(prompt)
    with torch.inference_mode():
        output = oracle(torch.tensor([prompt]), use_cache=True)
        for _ in range(NEW):
            expected.append(int(output.logits[0, -1].argmax()))
            output = oracle(torch.tensor([expected[-1:]]), **behind(output))
    native = load_model(
        files_of(variant)[0], EngineConfig(backend="native", dtype="float32", threads=1, kv_cache_dtype="float32")
    )
    settings = {"backend": "native", "dtype": "float32", "block_size": 16, "kv_cache_dtype": "float32"}
    for drafter, chunk, found, more in (
        ("none", 512, model, {}),
        ("none", 512, native, settings),
        ("ngram", 7, native, settings),
    ):
        engine = make(found, drafter=drafter, depth=3, max_model_len=160, max_num_batched_tokens=chunk, **more)
        wanted = [request(prompt[: 24 - 5 * i], name=f"r{i}", max_tokens=NEW, stops=()) for i in range(2)]
        outputs = run(engine, wanted)
        assert outputs["r0", 0].tokens == expected[len(prompt) :], (drafter, chunk)


GGUF_KEYS: dict[str, str] = {
    "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "logit_scale": "logit_scale", "expert_count": "num_experts",
    "attention.layer_norm_epsilon": "layer_norm_eps", "attention.sliding_window": "sliding_window",
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size", "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size", "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta", "final_logit_softcapping": "final_logit_softcapping",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input", "altup.num_inputs": "altup_num_inputs",
    "attention.shared_kv_layers": "num_kv_shared_layers",
}  # fmt: skip
"""Keys of the converter -> those of config.json, or of the table below."""


def converted(config: Config) -> Config:
    """What the converter calculates."""
    kind, hidden = config["model_type"], config["hidden_size"]
    theirs = {**config, "num_experts": config.get("num_experts") or config.get("num_local_experts")}
    if kind == "granite":
        theirs["logit_scale"] = config["logits_scaling"]
    if kind == "minicpm":
        theirs |= {
            "embedding_multiplier": config["scale_emb"], "logit_scale": hidden / config["dim_model_base"],
            "residual_multiplier": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        }  # fmt: skip
    if kind in ("qwen2_moe", "mistral", "mixtral"):  # windows that are not used, or not written
        theirs["sliding_window"] = None
    return theirs


def converted_tensors(config: Config, arrays: Arrays) -> Arrays:
    """Under the same names: rows of q and k in llama.cpp's order, experts stacked."""
    found, stacks = {}, dict[str, dict[int, Any]]()
    for name, array in arrays.items():
        if config["model_type"] in PERMUTED and (match := re.search(r"\.([qk])_proj\.", name)):
            heads = config["num_attention_heads"] if match[1] == "q" else config["num_key_value_heads"]
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        name = f"{name}.weight" if name.endswith("_scale") else name
        if match := re.search(r"(\.experts|projections)\.(\d+)", name):
            stacks.setdefault(name.replace(match[0], match[1]), {})[int(match[2])] = array
        else:
            found[name] = array
    return found | {name: np.stack([each for _, each in sorted(parts.items())]) for name, parts in stacks.items()}


def write_converted(path: Path, config: Config, arrays: Arrays) -> Path:
    """A GGUF file, by the names of llama.cpp's converter."""
    kind, layers = config["model_type"], config["num_hidden_layers"]
    arch = ARCH[kind]
    names = gguf.get_tensor_name_map(next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), layers)
    writer = gguf.GGUFWriter(path, arch)
    for key, ours in GGUF_KEYS.items():
        value = converted(config).get(ours)
        if value is not None:
            by_kind = writer.add_uint32 if isinstance(value, int) else writer.add_float32
            (writer.add_array if isinstance(value, list) else by_kind)(f"{arch}.{key}", value)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(head_dim * config.get("partial_rotary_factor", 1)))
    if kind == "olmo3":
        writer.add_array(f"{arch}.attention.sliding_window_pattern", [(i + 1) % 4 != 0 for i in range(layers)])
    if kind == "gemma3n":
        slides = [each == "sliding_attention" for each in config["layer_types"]]
        writer.add_array(f"{arch}.attention.sliding_window_pattern", slides)
        shares = config["activation_sparsity_pattern"]
        writer.add_activation_sparsity_scale([NormalDist().inv_cdf(each) if each else -np.inf for each in shares])
    if kind == "exaone4":
        writer.add_array(f"{arch}.attention.sliding_window_pattern", [(i + 1) % 2 != 0 for i in range(layers)])
    if rope := config.get("rope_scaling"):
        for length in ("short", "long"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(2) / np.log(256)))
    for name, array in converted_tensors(config, arrays).items():
        writer.add_tensor(str(names.get_name(name, (".weight", ".bias"))), np.ascontiguousarray(array))
    add_vocabulary(writer, config["vocab_size"])
    return written(writer, path)


@pytest.mark.parametrize("variant", [name for name, each in VARIANTS.items() if name in ARCH or "longrope" in name])
def test_a_converted_file_says_the_same(variant: str, tmp_path: Path) -> None:
    _, config, arrays = files_of(variant)
    path = write_converted(tmp_path / "model.gguf", config, arrays)
    found = load_model(str(path), EngineConfig(backend="reference", dtype="float32", threads=1))
    model, tokens = model_of("mistral, no window" if variant == "mistral" else variant), prompt_of(30, 5)
    if variant == "cohere2":  # every fourth layer has no window there
        _, config, arrays = files_of(variant)
        folder = write_model(new_folder(), {**config, "sliding_window_pattern": 4}, arrays)
        model = load_model(str(folder), EngineConfig(backend="reference", dtype="float32", threads=1))
    logits = [logits_in_chunks(make(each, dtype="float32", drafter="none"), tokens, 30, 1) for each in (found, model)]
    assert float((logits[0] - logits[1]).abs().max()) <= 1e-5
