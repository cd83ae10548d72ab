"""Qwen3.5 and 3.6 (dense), alone or as the text part of the multimodal wrapper; native MTP under `mtp.`."""

from __future__ import annotations

from headstart.models import _gated_delta

FAMILY = _gated_delta.family(
    aliases=("qwen3_5_text", "qwen35"),
    tiled="qwen35",
    defaults={"num_key_value_heads": 4},
    small={"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1},
)
