"""Qwen3 (dense): per-head RMS norms on q and k, no biases. No native MTP."""

from __future__ import annotations

from typing import Any

from headstart.layers.build import DecoderConfig, decoder
from headstart.models._family import (
    Arrays,
    Config,
    Family,
    decoder_shapes,
    parse_decoder,
    random_arrays,
    tiny_config,
    without_prefix,
)


def parse(config: Config) -> DecoderConfig:
    attention_bias = bool(config.get("attention_bias", False))
    return parse_decoder({"head_dim": 128, **config}, qkv_bias=attention_bias, o_bias=attention_bias, qk_norm=True)


def tiny(**changes: Any) -> tuple[dict[str, Any], Arrays]:
    defaults = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "rope_theta": 1e6}
    config = tiny_config(**{**defaults, **changes})
    return config, random_arrays(decoder_shapes(parse(config)))


FAMILY = Family(parse=parse, canonical=without_prefix, build=decoder, tiny=tiny)
