"""Qwen3-Next; native MTP under `mtp.`, whose number released configs do not tell: a checkpoint has one or none."""

from __future__ import annotations

from headstart.models import _gated_delta

FAMILY = _gated_delta.family(
    aliases=("qwen3next",),
    joined=True,
    defaults={"num_key_value_heads": 2, "num_experts_per_tok": 10},
    experts=True,
    small={"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]},
)
