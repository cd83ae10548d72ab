"""Qwen3 (dense): per-head RMS norms on q and k, no biases. No native MTP."""

from __future__ import annotations

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag


def parse(config: Config) -> DecoderConfig:
    bias = flag(config, "attention_bias")
    mixers = [
        keys.attention(config, window=window, qkv_bias=bias, o_bias=bias, qk_norm=True)
        for window in keys.windows(config)
    ]
    return keys.decoder(config, [keys.layer(config, mixer, keys.mlp(config)) for mixer in mixers])


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 32768,
        "head_dim": 128,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    small={"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "rope_theta": 1e6},
)
