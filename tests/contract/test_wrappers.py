"""Multimodal models: the text part without the towers equals transformers' class."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles import fused_experts
from support import family_of, model_at, prompt_of
from test_families import assert_logits
from tiny_models import write_model
from torch import Tensor
from transformers import AutoConfig

Config = dict[str, Any]
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
HALF = {**MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "mlp_only_layers": []}
CASES: dict[str, tuple[str, str, Config]] = {
    "qwen2_vl": ("qwen2", "Qwen2VLTextModel", {"rope_parameters": MROPE}),
    "qwen2_5_vl": ("qwen2", "Qwen2_5_VLTextModel", {"rope_parameters": MROPE}),
    "qwen3_vl": ("qwen3", "Qwen3VLTextModel", {"rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 8}),
    "qwen3_vl_moe": (
        "qwen3_moe", "Qwen3VLMoeTextModel",
        {"rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 8, **EXPERTS, "norm_topk_prob": None}),
    "glm4v": ("glm4", "Glm4vTextModel", {"rope_parameters": HALF}),
    "glm4v_moe": (
        "glm4_moe", "Glm4vMoeTextModel", {"rope_parameters": HALF, "use_qk_norm": False, "num_nextn_predict_layers": 0},
    ),
}  # fmt: skip
"""model_type of a wrapper -> the family, transformers' class of the text part, and what its config says."""


def logits_of_text_model(kind: str, config: Config, tensors: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits [T, V] of transformers' text model."""
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    named = {key: value for key, value in config.items() if key != "model_type" and value is not None}
    text = AutoConfig.for_model(f"{kind}_text", **named)
    model = getattr(module, CASES[kind][1])._from_config(text, attn_implementation="eager")
    inside = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    model.load_state_dict(fused_experts(inside))
    with torch.inference_mode():
        hidden = model.eval()(torch.tensor([tokens]), use_cache=False).last_hidden_state
    return (hidden @ tensors["lm_head.weight"].T)[0]


@pytest.mark.parametrize("kind", CASES)
def test_text_part_matches_transformers(kind: str, tmp_path: Path) -> None:
    family, _, changes = CASES[kind]
    config, arrays = family_of(family).tiny(**{"rope_theta": None, **changes})
    tokens = prompt_of(60, 5)
    expected = logits_of_text_model(kind, config, {name: torch.tensor(array) for name, array in arrays.items()}, tokens)
    wrapper = {
        "model_type": kind, "text_config": {**config, "model_type": f"{kind}_text"}, "image_token_id": 5,
        "vision_config": {"hidden_size": 8}, "tie_word_embeddings": False, "video_token_id": 6,
        "vocab_size": config["vocab_size"],
    }  # fmt: skip
    stacks = kind == "qwen3_vl_moe"
    fused = {name: array.numpy() for name, array in fused_experts(
        {name: torch.tensor(array) for name, array in arrays.items()}).items()} if stacks else arrays  # fmt: skip
    files = {
        name.replace("model.", "model.language_model.", 1): array.swapaxes(1, 2) if array.ndim == 3 else array
        for name, array in fused.items()
    }
    files |= {"model.visual.patch_embed.weight": np.ones(8, np.float32)}
    files = {name: np.ascontiguousarray(each) for name, each in files.items()}
    assert_logits(model_at(write_model(tmp_path / "model", wrapper, files)), tokens, expected, (7, 7))
