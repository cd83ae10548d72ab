"""Qwen2 and Qwen2.5 (dense): Llama's layout with biases on q, k and v. No native MTP."""

from __future__ import annotations

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, {"use_mrope": False})
    mixers = [keys.attention(config, window=window, qkv_bias=True) for window in keys.windows(config)]
    return keys.decoder(config, [keys.layer(config, mixer, keys.mlp(config)) for mixer in mixers])


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    harmless={"attention_bias": "q, k and v have one in every file"},
    small={"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6},
)
