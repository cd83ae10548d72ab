"""Qwen3 with experts (30B-A3B, 235B-A22B), and Qwen3-VL with experts.

Formula: transformers `models/qwen3_moe`; `models/qwen3_vl_moe` always normalizes the chosen scores and stores experts
as [experts, in, out].
"""

from headstart.layers.build import DecoderConfig
from headstart.models import _qwen_vision, keys
from headstart.models.base import Family
from headstart.models.joined import transposed_experts
from headstart.models.keys import Config, flag, number
from headstart.models.names import WRAPPED, Names
from headstart.models.small import SCRATCH_EXPERTS

VISION_TYPES = ("qwen3_vl_moe", "qwen3_vl_moe_text", "qwen3vlmoe")


def parse(config: Config) -> DecoderConfig:
    kind = config.get("model_type")
    config = keys.text_config(config)
    window = number(config, "sliding_window", default=0, least=0) if flag(config, "use_sliding_window") else 0
    mixer = keys.attention(config, window=window, qk_norm=True, **keys.biases(config))
    experts = keys.softmax_experts(keys.inside(config, {"norm_topk_prob": True}) if kind in VISION_TYPES else config)
    sparse = [keys.has_experts(config, i) for i in range(keys.num_layers(config))]
    layers = [keys.layer(config, mixer, experts if each else keys.mlp(config)) for each in sparse]
    return keys.decoder(config, layers)


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 32768, "num_key_value_heads": 4, "num_experts_per_tok": 8, "norm_topk_prob": False,
        "sliding_window": 4096, "mrope_interleaved": True,
    },
    harmless={
        "max_window_layers": "a window is for all layers",
        "n_deepstack_layers": "of images, whose tensors are left out",
        "sliding_window": "of use_sliding_window only",
        "shared_expert_intermediate_size": "there is none",
        "intermediate_size": "used only by dense layers",
    },
    names=Names(WRAPPED),
    adapt=transposed_experts,
    vision=_qwen_vision.VISION,
    aliases=("qwen3moe", *VISION_TYPES),
    small={
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, "rope_theta": 1e6,
        "moe_intermediate_size": 24, "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    scratch={**SCRATCH_EXPERTS, "num_experts": 8, "mlp_only_layers": []},
)  # fmt: skip
