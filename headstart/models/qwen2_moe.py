"""Qwen1.5-MoE and Qwen2-57B-A14B."""

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import FULL, SLIDING, Config, flag, number
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
            for i, window in enumerate(_windows(config))
        ],
    )


def _windows(config: Config) -> list[int]:
    """Sliding window of each layer, 0: unlimited. Without `layer_types` every other one of the first layers has a
    window (transformers 5.23)."""
    window = number(config, "sliding_window", default=0, least=0) if flag(config, "use_sliding_window") else 0
    first = number(config, "max_window_layers", default=0, least=0)
    slides = [window > 0 and i % 2 == 0 and i < first for i in range(keys.num_layers(config))]
    unlisted = [SLIDING if each else FULL for each in slides]
    kinds = keys.layer_kinds(config, (FULL, SLIDING) if window else (FULL,), unlisted)
    return [window if kind == SLIDING else 0 for kind in kinds]


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
