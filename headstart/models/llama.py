"""Llama and the many checkpoints that use its layout (SmolLM2 among them). No native MTP."""

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
    return parse_decoder(
        config, qkv_bias=attention_bias, o_bias=attention_bias, mlp_bias=bool(config.get("mlp_bias", False))
    )


def tiny(**changes: Any) -> tuple[dict[str, Any], Arrays]:
    defaults = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    config = tiny_config(**{**defaults, **changes})
    return config, random_arrays(decoder_shapes(parse(config)))


FAMILY = Family(parse=parse, canonical=without_prefix, build=decoder, tiny=tiny, interleaved_rope=True)
