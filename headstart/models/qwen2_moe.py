"""Qwen1.5-MoE and Qwen2-57B-A14B."""

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag, number
from headstart.models.names import PREFIXES, Names

SHARED = "shared_expert_intermediate_size"


def parse(config: Config) -> DecoderConfig:
    experts = keys.softmax_experts(config, shared=number(config, SHARED))
    bias = flag(config, "qkv_bias", True)
    return keys.decoder(
        config,
        [
            keys.layer(
                config,
                keys.attention(config, qkv_bias=bias, window=window),
                experts if keys.has_experts(config, i) else keys.mlp(config),
            )
            for i, window in enumerate(keys.windows(config, _slides))
        ],
    )


def _slides(layer: int, first_full: int) -> bool:
    """Without `layer_types` every other one of the first layers has a window (transformers 5.23)."""
    return layer % 2 == 0 and layer < first_full


FAMILY = Family(
    parse=parse,
    names=Names(PREFIXES, {".mlp.shared_expert.": ".mlp.shared_experts."}),
    defaults={
        "max_position_embeddings": 32768, "num_key_value_heads": 16, "sliding_window": 4096, "max_window_layers": 28,
        "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False, "moe_intermediate_size": 1408,
        SHARED: 5632,
    },
    harmless={
        "intermediate_size": "used only by dense layers",
        "attention_bias": "q, k and v have one in every file",
        "n_shared_experts": "one, whose width is said",
        "sliding_window": "of use_sliding_window only",
    },
    aliases=("qwen2moe",),  # llama.cpp's
    small={
        "model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 7,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24, SHARED: 40,
    },
)  # fmt: skip
