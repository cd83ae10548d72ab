"""Qwen2 and Qwen2.5 (dense): Llama's layout with biases on q, k and v. No native MTP."""

from __future__ import annotations

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config


def parse(config: Config) -> DecoderConfig:
    layer = keys.layer(config, keys.attention(config, qkv_bias=True), keys.mlp(config))
    return keys.decoder(config, [layer] * keys.num_layers(config))


FAMILY = Family(
    parse=parse,
    small={"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6},
)
