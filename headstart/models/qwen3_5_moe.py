"""Qwen3.5 and 3.6 with mixtures of experts, alone or as the text part of the multimodal wrapper."""

from __future__ import annotations

from headstart.models import _gated_delta

FAMILY = _gated_delta.family(
    aliases=("qwen3_5_moe_text", "qwen35moe"),
    tiled="qwen35moe",
    defaults={"num_key_value_heads": 2, "num_experts_per_tok": 8},
    experts=True,
    small={"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "mtp_num_hidden_layers": 1},
)
