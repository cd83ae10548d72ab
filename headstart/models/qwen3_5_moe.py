"""Qwen3.5 and 3.6 with experts."""

from headstart.models import _gated_delta
from headstart.models.mtp import MTPLayout

FAMILY = _gated_delta.family(
    aliases=("qwen3_5_moe_text", "qwen35moe"),
    tiled="qwen35moe",
    defaults={"num_key_value_heads": 2, "num_experts_per_tok": 8},
    experts=True,
    mtp=MTPLayout(
        title="Qwen3.5, 3.6 (MoE)",
        **_gated_delta.NEWER,
        speculators=("qwen3_5_moe_text",),
        llama_cpp=("qwen35moe",),
        llama_cpp_draft=_gated_delta.llama_cpp_draft("qwen35moe"),
    ),
    small={"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "mtp_num_hidden_layers": 1},
)
