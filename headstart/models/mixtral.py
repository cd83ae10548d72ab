"""Mixtral (8x7B, 8x22B).

Mistral's attention, experts in every layer. llama.cpp calls it llama.
"""

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, number
from headstart.models.names import PREFIXES, Names


def parse(config: Config) -> DecoderConfig:
    experts = keys.softmax_experts(config, inner=number(config, "intermediate_size"))
    return keys.stack(config, windows=keys.windows_in_turn(config), feed_forward=experts)


FAMILY = Family(
    parse=parse,
    names=Names(
        PREFIXES, {"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    ),
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "num_local_experts": 8, "num_experts_per_tok": 2,
    },
    small={
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 5,
        "num_experts_per_tok": 2, "intermediate_size": 24,
    },
)  # fmt: skip
