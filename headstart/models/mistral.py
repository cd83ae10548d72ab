"""Mistral, Ministral, Mistral Small 3.1 and later.

Formula: transformers `models/mistral`, `models/ministral`, `models/ministral3` (queries scaled by position),
`models/mistral3`. llama.cpp calls the older ones llama.
"""

from headstart.kernels.ops import AttentionTemperature
from headstart.layers.build import DecoderConfig
from headstart.layers.rope import scaling_of
from headstart.models import _pixtral, keys
from headstart.models.base import Family
from headstart.models.keys import Config, number, real
from headstart.models.names import WRAPPED, Names


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    return keys.stack(config, windows=keys.windows_in_turn(config), mixer={"temperature": _temperature(config)})


def _temperature(config: Config) -> AttentionTemperature | None:
    """Factor of queries that grows with the position (Ministral 3); None without `llama_4_scaling_beta`."""
    scaling = scaling_of(config)
    strength = real(scaling, "llama_4_scaling_beta", 0.0)
    return AttentionTemperature(number(scaling, "original_max_position_embeddings"), strength) if strength else None


FAMILY = Family(
    parse=parse,
    names=Names(WRAPPED),
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    harmless={
        **dict.fromkeys(
            ("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "image_token_index"),
            "of images, whose tensors are left out",
        )
    },
    vision=_pixtral.VISION,
    aliases=("ministral", "ministral3", "mistral3"),
    small={"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 9},
)
