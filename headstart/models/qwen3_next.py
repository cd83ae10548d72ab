"""Qwen3-Next; native MTP under `mtp.`, whose number released configs do not tell: a checkpoint has one or none."""

from __future__ import annotations

from typing import Any

from headstart.layers.build import decoder
from headstart.models import _gated_delta
from headstart.models._family import Arrays, Family


def tiny(**changes: Any) -> tuple[dict[str, Any], Arrays]:
    defaults = {"architectures": ["Qwen3NextForCausalLM"], **_gated_delta.TINY_EXPERTS}
    return _gated_delta.tiny_hybrid("qwen3_next", {**defaults, **changes}, joined=True)


FAMILY = Family(
    parse=_gated_delta.parse,
    canonical=_gated_delta.canonical,
    build=decoder,
    tiny=tiny,
    head=_gated_delta.HEAD,
    trailing=True,  # in GGUF files
    adapt=_gated_delta.adapt,
    scratch=_gated_delta.SCRATCH_MOE,
    aliases=("qwen3next",),
)
