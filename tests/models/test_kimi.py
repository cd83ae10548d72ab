"""Kimi-K2: DeepSeek-V3's layers under other names, and the text part of Kimi-K2.5."""

from pathlib import Path

import numpy as np
import pytest
from support import family_of, model_at
from tiny_models import write_model

from headstart.models.small import Arrays


@pytest.mark.parametrize("wrapped", [False, True])
def test_kimi_equals_deepseek_v3(wrapped: bool, tmp_path: Path) -> None:
    config, arrays = family_of("deepseek_v3").tiny(num_nextn_predict_layers=0)
    plain = model_at(write_model(tmp_path / "plain", config, arrays))
    kimi = {**config, "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    named: Arrays = dict(arrays)
    if wrapped:
        kimi = {
            "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": kimi,
            "vocab_size": config["vocab_size"], "vision_config": {"model_type": "kimi_k25_vision"},
            "media_placeholder_token_id": 7, "ignore_index": -100,
            "tie_word_embeddings": False, "use_unified_vision_chunk": True, "video_placeholder": "<video>",
        }  # fmt: skip
        named = {f"language_model.{name}": array for name, array in arrays.items()}
        named |= dict.fromkeys(("vision_tower.patch.weight", "mm_projector.linear_1.weight"), np.ones((2, 2), "f4"))
    found = model_at(write_model(tmp_path / "kimi", kimi, named))
    assert found.config == plain.config and set(found.weights.tensors) == set(plain.weights.tensors)
    for name, tensor in plain.weights.tensors.items():
        np.testing.assert_array_equal(found.weights.tensors[name].float32(), tensor.float32(), err_msg=name)
