"""Qwen3 (dense) and Qwen3-VL.

Formula: transformers `models/qwen3`, `models/qwen3_vl`: for text all axes of the rope have the same position.
"""

from headstart.layers.build import DecoderConfig
from headstart.models import _qwen_vision, keys, qwen2
from headstart.models.base import Family
from headstart.models.keys import Config
from headstart.models.names import WRAPPED, Names


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    mixer = {**keys.biases(config), "qk_norm": True}
    return keys.stack(config, windows=keys.windows(config), mixer=mixer)


FAMILY = Family(
    parse=parse,
    names=Names(WRAPPED),
    harmless={"n_deepstack_layers": "of images, whose tensors are left out"},
    vision=_qwen_vision.VISION,
    aliases=("qwen3_vl", "qwen3_vl_text", "qwen3vl"),
    defaults={**qwen2.FAMILY.defaults, "head_dim": 128, "mrope_interleaved": True},
    small={"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "rope_theta": 1e6},
)
