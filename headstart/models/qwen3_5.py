"""Qwen3.5 and 3.6 (dense), alone or as the text part of the multimodal wrapper; native MTP under `mtp.`."""

from __future__ import annotations

from typing import Any

from headstart.layers.build import DecoderConfig, decoder
from headstart.models import _gated_delta
from headstart.models._family import Arrays, Config, Family

GGUF = "qwen35"


def parse(config: Config) -> DecoderConfig:
    return _gated_delta.parse(config, tiled=config.get("model_type") == GGUF)


def tiny(**changes: Any) -> tuple[dict[str, Any], Arrays]:
    defaults = {"architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1}
    return _gated_delta.tiny_hybrid("qwen3_5_text", {**defaults, **changes}, joined=False)


FAMILY = Family(
    parse=parse,
    canonical=_gated_delta.canonical,
    build=decoder,
    tiny=tiny,
    head=_gated_delta.HEAD,
    trailing=True,  # in GGUF files
    adapt=_gated_delta.adapt,
    scratch=_gated_delta.SCRATCH,
    aliases=("qwen3_5_text", GGUF),
)
