"""Qwen2 and Qwen2.5 (dense): Llama's layout with biases on q, k and v. No native MTP."""

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
    return parse_decoder(config, qkv_bias=True)


def tiny(**changes: Any) -> tuple[dict[str, Any], Arrays]:
    defaults = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6}
    config = tiny_config(**{**defaults, **changes})
    return config, random_arrays(decoder_shapes(parse(config)))


FAMILY = Family(parse=parse, canonical=without_prefix, build=decoder, tiny=tiny)
