"""Mistral and Ministral: Llama's layers, in some files with windows. Of Mistral Small 3.1 and later the text part.

Formula: transformers `models/mistral`, `models/ministral`, `models/mistral3`. llama.cpp calls them llama.
"""

from __future__ import annotations

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config
from headstart.models.names import WRAPPED, Names


def parse(config: Config) -> DecoderConfig:
    config, tied = keys.text_config(config)
    return keys.stack(config, windows=keys.windows_in_turn(config), tied=tied)


FAMILY = Family(
    parse=parse,
    names=Names(WRAPPED),
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    harmless={
        **dict.fromkeys(
            ("multimodal_projector_bias", "projector_hidden_act", "spatial_merge_size", "image_token_index"),
            "of pictures, whose tensors are left out",
        ),
    },
    aliases=("ministral", "mistral3"),
    small={"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 9},
)
