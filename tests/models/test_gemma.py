"""Gemma in published forms: the text part of multimodal checkpoints, GGUF files, refused configs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_gguf
from support import family_of, make, model_at, prompt_of, request, run
from tiny_models import write_model

from headstart.engine.load import Model
from headstart.errors import ModelError
from headstart.models.families import family_named
from headstart.models.small import Arrays

FAMILIES = ("gemma3", "gemma4")
Tiny = tuple[dict[str, Any], Arrays]


@pytest.fixture
def tiny(request: pytest.FixtureRequest) -> Tiny:
    changes_of_family = {
        "gemma3": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6},
        "gemma4": {"rope_theta": 1e6},
    }
    return family_of(request.param).tiny(**changes_of_family.get(request.param, {}))  # values that GGUF files give


def logprobs(model: Model) -> list[float]:
    wanted = request(prompt_of(30, 1), max_tokens=8, stops=(), prompt_logprobs=0, logprobs=0)
    found = run(make(model, dtype="float32", drafter="none"), [wanted])["r", 0]
    return [each.logprob for each in (*found.prompt_logprobs, *found.logprobs) if each]


@pytest.mark.slow
@pytest.mark.parametrize("tiny", (*FAMILIES, "gemma3n"), indirect=True)
def test_text_part_of_multimodal_checkpoints_is_loaded(tiny: Tiny, tmp_path: Path) -> None:
    """Tensor names of older and newer transformers; image and audio towers are skipped."""
    config, arrays = tiny
    outside = {key: config[key] for key in ("architectures", "tie_word_embeddings", "eos_token_id")}
    wrapper = {
        **outside, "model_type": config["model_type"].removesuffix("_text"), "text_config": config,
        "vision_config": {"hidden_size": 8}, "mm_tokens_per_image": 256, "vocab_size": config["vocab_size"],
    }  # fmt: skip
    expected = model_at(write_model(tmp_path / "plain", config, arrays))
    for number, (old, new) in enumerate((("model.", "language_model.model."), ("model.", "model.language_model."))):
        named = {name.replace(old, new, 1): array for name, array in arrays.items()}
        named["vision_tower.x.weight"] = named["model.multi_modal_projector.y"] = np.ones(8, np.float32)
        found = model_at(write_model(tmp_path / str(number), wrapper, named))
        assert found.config == expected.config
        # torch's products differ in the last bits with the alignment of weights
        np.testing.assert_allclose(logprobs(found), logprobs(expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tiny", FAMILIES, indirect=True)
def test_gguf_files_of_llama_cpp_equal_the_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    """Covers folded norms, tensor names, and values missing in such files."""
    plain = model_at(write_model(tmp_path / "plain", *tiny))
    found = model_at(write_gguf(tmp_path / "model.gguf", *tiny))
    np.testing.assert_allclose(logprobs(found), logprobs(plain), atol=2e-5)


def test_shared_kv_layers_read_the_last_layer_of_their_kind() -> None:
    """Sizes of E2B: 20 of 35 layers share keys. Key tensors of such layers are ignored, as in transformers."""
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    sizes = family_of("gemma4").read(
        {"model_type": "gemma4_text", "num_hidden_layers": 35, "layer_types": kinds * 7, "num_kv_shared_layers": 20,
         "num_key_value_heads": 1, "hidden_size": 1536, "intermediate_size": 6144, "use_double_wide_mlp": True}
    )  # fmt: skip
    shares: list[Any] = [layer.mixer.source_layer for layer in sizes.layers]
    assert shares == [None] * 15 + [13, 13, 13, 13, 14] * 4
    assert [layer.mlp.inner for layer in sizes.layers] == [6144] * 15 + [12288] * 20
    with pytest.raises(ModelError, match="no full_attention layer is left whose keys layer 2 could read"):
        family_of("gemma4").tiny(num_kv_shared_layers=1)


def test_assistant_is_not_a_model() -> None:
    with pytest.raises(ModelError, match="gemma4_assistant is no model by itself"):
        family_named("gemma4_assistant")


def test_score_scale_of_gemma_27b_is_read_from_gguf_files() -> None:
    """Only this model does not scale scores by head width; llama.cpp identifies it by its number of layers."""
    sizes = {
        "model_type": "gemma3", "hidden_size": 5376, "num_attention_heads": 32, "head_dim": 128, "vocab_size": 9,
        "query_pre_attn_scalar": 0, "intermediate_size": 9,
    }  # fmt: skip
    for layers, scalar in ((62, 168), (48, 128)):
        mixer: Any = family_of("gemma3").read({**sizes, "num_hidden_layers": layers}).layers[0].mixer
        assert mixer.spec.scale == scalar**-0.5


@pytest.mark.parametrize(("changes", "said"), [
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True, which is not supported"),
    ({"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50\.0, which is not known for gemma3_text"),
    ({"rope_parameters": {"rope_type": "linear"}}, "must have a rope for each kind of layer"),
    ({"layer_types": ["chunked_attention"] * 3}, "layer type 'chunked_attention' is not supported"),
])  # fmt: skip
def test_unsupported_configs_are_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        family_of("gemma3").tiny(**changes)


@pytest.mark.parametrize(("changes", "said"), [
    ({"altup_active_idx": 3}, "altup_active_idx is 3, but altup_num_inputs 3"),
    ({"activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0]}, r"activation_sparsity_pattern is \[0\.9, 0\.5, 0\.0"),
    ({"activation_sparsity_pattern": [0.9, 1.0, 0.0, 0.0, 0.0]}, "activation_sparsity_pattern is"),
    ({"intermediate_size": [80, 80]}, "intermediate_size has widths of 2 layers, not of layer 2"),
    ({"num_kv_shared_layers": 4}, "no full_attention layer is left whose keys layer 1 could read"),
])  # fmt: skip
def test_invalid_sizes_of_gemma_3n_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        family_of("gemma3n").tiny(**changes)
