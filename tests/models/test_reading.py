"""Reading configs: each key is read, known to have no effect, or refused by name."""

from typing import Any

import pytest
from support import ALL_FAMILIES, family_of

from headstart.errors import ModelError
from headstart.layers.attention import AttentionConfig
from headstart.models.mtp import count_keys
from headstart.models.reading import HARMLESS, NEUTRAL

SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KEYS = (
    "rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "layer_types", "sliding_window",
    "max_window_layers", "text_config", "attention_bias", "tie_word_embeddings", "mlp_only_layers", "mtp_recycle",
    "decoder_sparse_step", "original_max_position_embeddings", "num_nextn_predict_layers", "mtp_config",
    "full_attention_interval", "recurrent_layers", "rope_interleave", "scoring_func", "num_local_experts",
)  # fmt: skip
GARBAGE: tuple[Any, ...] = (
    None, True, 0, -1, 2**33, 2**70, 1.5, float("nan"), float("inf"), 1e-320, "", "x", "8", [], [[]], [None] * 3,
    ["sliding_attention"] * 3, {}, {"a": 1}, {"rope_type": 5}, {"type": ["a"]}, {"rope_type": "longrope"},
    {"rope_type": "llama3", "factor": 0}, {"rope_type": "yarn", "factor": "x"},
    {"rope_type": "linear", "factor": 1e-300},
    {**SCALED, "mscale": -1, "mscale_all_dim": "a"}, {**SCALED, "rope_theta": 1.0}, {**SCALED, "beta_fast": 1e-300},
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_invalid_values_raise_model_errors_only(family: str) -> None:
    found = family_of(family)
    config, _ = found.tiny()
    for key in {*config, *found.defaults, *KEYS}:
        for value in GARBAGE:
            changed = {**config, key: value, **({"use_sliding_window": True} if "window" in key else {})}
            try:
                found.read(changed)
            except ModelError as error:
                assert error.message


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_unknown_keys_are_named_with_their_values(family: str) -> None:
    found = family_of(family)
    config, _ = found.tiny()
    with pytest.raises(ModelError, match=r"a\.json: qk_clip is 3, new_thing is 'x', which are not known for") as error:
        found.read({**config, "qk_clip": 3, "new_thing": "x", "nothing": None, "_private": 1}, "a.json")
    assert "remove it" in error.value.hint
    found.read({**config, "qk_clip": 3}, strict=False)
    read = {"text_config", "mtp_recycle", "model_type", "eos_token_id"}  # eos_token_id is read by n-gram memories
    found.read({**config, **dict.fromkeys(HARMLESS.keys() - read, "x")})
    neutral = {key: values[0] for key, values in NEUTRAL.items()} | dict.fromkeys(count_keys(), 0)
    found.read({**neutral, **config})


def test_ignored_keys_have_reasons() -> None:
    for family in ALL_FAMILIES:
        assert all({**HARMLESS, **family_of(family).harmless}.values()), family


def test_nested_text_config_equals_a_plain_config() -> None:
    found = family_of("qwen3_5")
    config, _ = found.tiny()
    wrapper = {"model_type": "qwen3_5", "text_config": config, "vision_config": {"depth": 1}, "image_token_id": 3}
    assert found.read(wrapper) == found.read(config)
    for changed in ({**wrapper, "projector": 1}, {**wrapper, "text_config": {**config, "projector": 1}}):
        with pytest.raises(ModelError, match="projector is 1, which is not known"):
            found.read(changed)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mimo"])
def test_sliding_windows_apply_to_selected_layers(family: str) -> None:
    found = family_of(family)
    config, _ = found.tiny(use_sliding_window=True, sliding_window=7)

    def windows(**changes: Any) -> list[int]:
        mixers = [layer.mixer for layer in found.read({**config, **changes}).layers]
        return [mixer.spec.window for mixer in mixers if isinstance(mixer, AttentionConfig)]

    assert windows(max_window_layers=1) == [0, 7, 7]
    assert windows() == [0, 0, 0], "max_window_layers is 28 by default"
    assert windows(layer_types=["sliding_attention", "full_attention", "full_attention"]) == [7, 0, 0]
    assert windows(max_window_layers=0, use_sliding_window=False) == [0, 0, 0]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_null_window_of_windowed_layers_is_refused(family: str) -> None:
    found = family_of(family)
    with pytest.raises(ModelError, match="sliding_window is missing or not a number"):
        found.read(found.tiny_config(sliding_window=None))


def test_longrope_limits_the_context_length() -> None:
    found, factors = family_of("llama"), [1.0 + i for i in range(4)]
    rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 8.0}
    config, _ = found.tiny(max_position_embeddings=512)
    assert found.read({**config, "rope_scaling": {**rope, "original_max_position_embeddings": 64}}).max_length == 64
    assert found.read({**config, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}).max_length == 512
