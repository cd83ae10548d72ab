"""Families that are Llama's layers with declared differences: compared with transformers' class on both backends, with
and without drafts, and read from GGUF files as llama.cpp's converter writes them."""

import re
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np
import pytest
from family_rows import ROWS, row_of
from gguf_files import in_rope_order, stacked, write_file
from oracles import assert_greedy_text, logits_of_oracle, oracle_of
from support import RELATIVES, family_of, make, model_at, new_folder, prompt_of, request, run
from test_families import assert_logits, logits_in_chunks
from tiny_models import write_model

from headstart.engine.load import Model
from headstart.models.small import Arrays

Config = dict[str, Any]
LENGTH, NEW = 70, 24
VARIANTS: dict[str, Config] = {
    **{name: {"model_type": name} for name in RELATIVES},
    **{name: dict(changes) for family in RELATIVES for name, changes in row_of(family).variants.items()},
}
"""Families, and what else their configs say."""
FAMILY_OF = {each["model_type"]: family for family in RELATIVES for each in row_of(family).variants.values()}
"""model_type -> family, also by its other names."""
ARCH = {kind: arch for row in ROWS.values() for kind, arch in row.gguf.items()}
"""model_type -> llama.cpp's architecture."""


@cache
def files_of(variant: str) -> tuple[Path, Config, Arrays]:
    """Folder, config and arrays of a tiny random model."""
    changes = VARIANTS[variant]
    kind = changes["model_type"]
    config, arrays = family_of(FAMILY_OF.get(kind, kind)).tiny(**changes)
    return write_model(new_folder(), config, arrays), config, arrays


@cache
def model_of(variant: str) -> Model:
    return model_at(files_of(variant)[0])


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str) -> None:
    model, tokens = model_of(variant), prompt_of(LENGTH, 5)
    expected = logits_of_oracle(oracle_of(VARIANTS[variant]["model_type"], model), tokens)
    assert_logits(model, tokens, expected, (LENGTH, 1), (7, 31))


@pytest.mark.parametrize(
    "variant", [pytest.param(each, marks=() if each in RELATIVES else pytest.mark.slow) for each in VARIANTS]
)
def test_greedy_text_matches_transformers_on_both_backends(variant: str) -> None:
    """With lookup drafts and without, batched and in chunks."""
    pytest.importorskip("headstart.kernels.native._native")
    model, prompt = model_of(variant), prompt_of(12, 8) * 2
    native = model_at(files_of(variant)[0], "native", kv_cache_dtype="float32")
    settings = {"backend": "native", "dtype": "float32", "block_size": 16, "kv_cache_dtype": "float32"}
    texts = []
    for drafter, chunk, found, more in (("none", 512, model, {}), ("none", 512, native, settings),
                                        ("ngram", 7, native, settings)):  # fmt: skip
        engine = make(found, drafter=drafter, depth=3, max_model_len=160, max_num_batched_tokens=chunk, **more)
        wanted = [request(prompt[: 24 - 5 * i], name=f"r{i}", max_tokens=NEW, stops=()) for i in range(2)]
        texts.append(run(engine, wanted)["r0", 0].tokens)
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == NEW
    assert_greedy_text(oracle_of(VARIANTS[variant]["model_type"], model), prompt, texts[0])


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


def converted_config(config: Config) -> Config:
    """Config with the values that the converter computes."""
    kind, hidden = config["model_type"], config["hidden_size"]
    theirs = {**config, "num_experts": config.get("num_experts") or config.get("num_local_experts")}
    if kind == "granite":
        theirs["logit_scale"] = config["logits_scaling"]
    if kind == "minicpm":
        theirs |= {
            "embedding_multiplier": config["scale_emb"], "logit_scale": hidden / config["dim_model_base"],
            "residual_multiplier": config["scale_depth"] / config["num_hidden_layers"] ** 0.5,
        }  # fmt: skip
    if kind in ("qwen2_moe", "mistral", "mixtral"):  # windows that are unused or not written
        theirs["sliding_window"] = None
    return theirs


def converted_tensors(config: Config, arrays: Arrays) -> Arrays:
    """Tensors under the same names, with llama.cpp's order of q and k rows and stacked experts."""
    found = Arrays()
    for name, array in arrays.items():
        if row_of(config["model_type"]).has_gguf_rope_order and (match := re.search(r"\.([qk])_proj\.", name)):
            array = in_rope_order(array, config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])
        found[f"{name}.weight" if name.endswith("_scale") else name] = array
    return stacked(found)


def write_converted(path: Path, config: Config, arrays: Arrays) -> Path:
    """A GGUF file with the names of llama.cpp's converter."""
    kind, layers = config["model_type"], config["num_hidden_layers"]
    arch = ARCH[kind]
    names = gguf.get_tensor_name_map(next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == arch), layers)
    tensors = {str(names.get_name(name, (".weight", ".bias"))): array
               for name, array in converted_tensors(config, arrays).items()}  # fmt: skip
    metadata = {key: converted_config(config).get(ours) for key, ours in GGUF_KEYS.items()}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    metadata["rope.dimension_count"] = int(head_dim * config.get("partial_rotary_factor", 1))
    if every := {"olmo3": 4, "exaone4": 2}.get(kind):
        metadata["attention.sliding_window_pattern"] = [(i + 1) % every != 0 for i in range(layers)]
    if kind == "gemma3n":
        metadata["attention.sliding_window_pattern"] = [each == "sliding_attention" for each in config["layer_types"]]
        shares = config["activation_sparsity_pattern"]
        metadata["activation_sparsity_scale"] = [NormalDist().inv_cdf(each) if each else -np.inf for each in shares]
    if rope := config.get("rope_scaling"):
        for length in ("short", "long"):
            tensors[f"rope_factors_{length}.weight"] = np.array(rope[f"{length}_factor"], np.float32)
        metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        metadata["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(2) / np.log(256)))
    return write_file(path, arch, metadata, tensors, config["vocab_size"])


@pytest.mark.parametrize("variant", [name for name, each in VARIANTS.items() if name in ARCH or "longrope" in name])
def test_converted_file_equals_the_checkpoint(variant: str, tmp_path: Path) -> None:
    _, config, arrays = files_of(variant)
    found = model_at(write_converted(tmp_path / "model.gguf", config, arrays))
    model, tokens = model_of("mistral, no window" if variant == "mistral" else variant), prompt_of(30, 5)
    if variant == "cohere2":  # in the file, every fourth layer has no window
        model = model_at(write_model(new_folder(), {**config, "sliding_window_pattern": 4}, arrays))
    logits = [logits_in_chunks(make(each, dtype="float32", drafter="none"), tokens, 30, 1) for each in (found, model)]
    assert float((logits[0] - logits[1]).abs().max()) <= 1e-5
