"""Qwen3 with experts (30B-A3B, 235B-A22B): Qwen3's attention, experts chosen by a softmax. No native MTP."""

from __future__ import annotations

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag
from headstart.models.small import SCRATCH_EXPERTS


def parse(config: Config) -> DecoderConfig:
    bias = flag(config, "attention_bias")
    everywhere = {"max_window_layers": 0}  # a window would be for all layers, whatever the config says of some
    mixer = keys.attention({"head_dim": 128, **config, **everywhere}, qkv_bias=bias, o_bias=bias, qk_norm=True)
    experts = keys.softmax_experts(config, normalize=False)
    return keys.decoder(
        config,
        [
            keys.layer(config, mixer, experts if keys.has_experts(config, i) else keys.mlp(config))
            for i in range(keys.num_layers(config))
        ],
    )


FAMILY = Family(
    parse=parse,
    aliases=("qwen3moe",),  # llama.cpp's
    small={
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "rope_theta": 1e6,
        "moe_intermediate_size": 24, "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    scratch={**SCRATCH_EXPERTS, "num_experts": 8, "mlp_only_layers": []},
)  # fmt: skip
