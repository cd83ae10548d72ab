"""Tiny hybrid models in the forms that people have them in: a multimodal wrapper, GGUF; and broken ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_gguf
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
SHORT = ("lfm2", "lfm2_moe")
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


@pytest.mark.parametrize("family", SHORT)
def test_short_convolutions_in_a_gguf_file(family: str, tmp_path: Path) -> None:
    tiny = family_of(family).tiny()
    plain = model_at(write_model(tmp_path / "plain", *tiny))
    found = model_at(write_gguf(tmp_path / "model.gguf", *tiny))
    assert float((logits_of(found) - logits_of(plain)).abs().max()) <= 2e-5


def test_two_mtp_layers_in_a_gguf_file(tmp_path: Path) -> None:
    """What modules share stands in the first one only."""
    config, arrays = family_of("qwen3_5").tiny(mtp_num_hidden_layers=2)
    model = model_at(write_gguf(tmp_path / "model.gguf", config, arrays))
    assert model.head is not None
    first, second = model.head.modules
    assert (first.projection.weight == second.projection.weight).all()
    assert not (first.block.input_norm.weight == second.block.input_norm.weight).all()
