"""Qwen3.5 and 3.6 (dense): gated DeltaNet and attention layers."""

from headstart.models import _gated_delta
from headstart.models.mtp import MTPLayout

FAMILY = _gated_delta.family(
    aliases=("qwen3_5_text", "qwen35"),
    tiled="qwen35",
    defaults={"num_key_value_heads": 4},
    mtp=MTPLayout(
        title="Qwen3.5, 3.6, 3.8 (dense)",
        **_gated_delta.NEWER,
        speculators=("qwen3_5_text",),
        llama_cpp=("qwen35",),
        llama_cpp_draft=_gated_delta.llama_cpp_draft("qwen35"),
    ),
    small={"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "mtp_num_hidden_layers": 1},
)
