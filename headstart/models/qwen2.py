"""Qwen2 and Qwen2.5 (dense), Qwen2.5-VL, and the text part of Qwen2-VL.

Formula: transformers `models/qwen2`, `models/qwen2_5_vl`: for text all axes of the rope have the same position.
"""

from headstart.layers.build import DecoderConfig
from headstart.models import _qwen_vision, keys
from headstart.models.base import Family
from headstart.models.keys import Config
from headstart.models.names import WRAPPED, Names


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    keys.refuse_others(config, {"use_mrope": False})
    return keys.stack(config, windows=keys.windows(config), mixer={"qkv_bias": True})


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    harmless={
        "attention_bias": "q, k and v have one in every file",
        "vision_token_id": "of images, whose tensors are left out",
    },
    names=Names(WRAPPED),
    vision=_qwen_vision.VISION,
    aliases=("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2vl"),
    small={"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6},
)
