"""LFM2 and LFM2.5 with experts (8B-A1B, 24B-A2B)."""

from dataclasses import replace

from headstart.layers.build import DecoderConfig
from headstart.layers.mlp import MLPConfig
from headstart.models import _short_conv, keys
from headstart.models.base import Family
from headstart.models.keys import Config, number
from headstart.models.small import SCRATCH_EXPERTS


def parse(config: Config) -> DecoderConfig:
    mlp = MLPConfig(inner=number(config, "intermediate_size"))
    experts = replace(keys.sigmoid_experts(config), activation="silu")  # whatever hidden_act says
    first = number(config, "num_dense_layers", "first_k_dense_replace", default=2, least=0)
    return _short_conv.parse(config, mlp, lambda index: mlp if index < first else experts)


FAMILY = Family(
    parse=parse,
    defaults={**_short_conv.DEFAULTS, "num_experts_per_tok": 4},
    harmless=_short_conv.HARMLESS,
    names=_short_conv.NAMES,
    aliases=("lfm2moe",),  # llama.cpp's
    small={
        "model_type": "lfm2_moe", "architectures": ["Lfm2MoeForCausalLM"], "norm_eps": 1e-5, "conv_L_cache": 3,
        "full_attn_idxs": [1], "num_dense_layers": 1, "moe_intermediate_size": 24,
        "num_experts": 7, "num_experts_per_tok": 3, "routed_scaling_factor": 1.0, "tie_word_embeddings": True,
    },
    scratch={**SCRATCH_EXPERTS, "num_experts": 8},
)  # fmt: skip
