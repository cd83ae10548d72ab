"""Tiny hybrid models in the forms that people have them in: a multimodal wrapper, GGUF."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_gguf
from support import family_of, model_at
from test_checkpoints import logits_of

from headstart.models.small import Arrays
from headstart.tools.tiny import write_model

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
SHORT = ("lfm2", "lfm2_moe")
Tiny = tuple[dict[str, Any], Arrays]


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
