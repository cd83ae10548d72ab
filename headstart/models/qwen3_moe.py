"""Qwen3 with experts (30B-A3B, 235B-A22B): Qwen3's attention, experts chosen by a softmax. No native MTP."""

from __future__ import annotations

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag, number
from headstart.models.small import SCRATCH_EXPERTS


def parse(config: Config) -> DecoderConfig:
    bias = flag(config, "attention_bias")
    window = number(config, "sliding_window", default=0, least=0) if flag(config, "use_sliding_window") else 0
    mixer = keys.attention(config, window=window, qkv_bias=bias, o_bias=bias, qk_norm=True)
    experts = keys.softmax_experts(config)
    return keys.decoder(
        config,
        [
            keys.layer(config, mixer, experts if keys.has_experts(config, i) else keys.mlp(config))
            for i in range(keys.num_layers(config))
        ],
    )


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 32768, "num_key_value_heads": 4, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "sliding_window": 4096,
    },
    harmless={
        "max_window_layers": "a window is for all layers",
        "sliding_window": "of use_sliding_window only",
        "shared_expert_intermediate_size": "there is none",
        "intermediate_size": "of dense layers, where there are any",
    },
    aliases=("qwen3moe",),  # llama.cpp's
    small={
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "rope_theta": 1e6,
        "moe_intermediate_size": 24, "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    scratch={**SCRATCH_EXPERTS, "num_experts": 8, "mlp_only_layers": []},
)  # fmt: skip
