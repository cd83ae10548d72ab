"""Qwen3 (dense): per-head RMS norms on q and k, no biases. No native MTP."""

from __future__ import annotations

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag


def parse(config: Config) -> DecoderConfig:
    bias = flag(config, "attention_bias")
    mixer = keys.attention({"head_dim": 128, **config}, qkv_bias=bias, o_bias=bias, qk_norm=True)
    return keys.decoder(config, [keys.layer(config, mixer, keys.mlp(config))] * keys.num_layers(config))


FAMILY = Family(
    parse=parse,
    small={"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "rope_theta": 1e6},
)
