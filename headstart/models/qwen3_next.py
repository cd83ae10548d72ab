"""Qwen3-Next.

Released configs do not say whether a checkpoint has its one MTP module.
"""

from headstart.models import _gated_delta
from headstart.models.mtp import MTPLayout

FAMILY = _gated_delta.family(
    aliases=("qwen3next",),
    joined=True,
    defaults={"num_key_value_heads": 2, "num_experts_per_tok": 10},
    experts=True,
    mtp=MTPLayout(title="Qwen3-Next", released=1, speculators=("qwen3_next",), llama_cpp=("qwen3next",)),
    small={"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]},
)
