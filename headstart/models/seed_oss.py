"""Seed-OSS.

Llama's layers with biases on q, k and v.
"""

from headstart.models.base import Family
from headstart.models.llama import parse

FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True,
        "attention_out_bias": False,
    },
    harmless={"residual_dropout": "training only"},
    small={
        "model_type": "seed_oss", "architectures": ["SeedOssForCausalLM"], "attention_bias": True,
        "attention_out_bias": False,
    },
)  # fmt: skip
