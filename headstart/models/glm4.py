"""GLM-4 of 0414 (9B, 32B, Z1): joined gate and up, positions in half of each head with pairs side by side, norms before
and after each part.

Formula: transformers `models/glm4`.
"""

from __future__ import annotations

from functools import partial

from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import Norms
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.joined import join
from headstart.models.keys import Config, flag
from headstart.models.names import PREFIXES, Names


def parse(config: Config, norms: Norms = "sandwich") -> DecoderConfig:
    return keys.stack(config, mixer={"qkv_bias": flag(config, "attention_bias", True)}, layer={"norms": norms})


LAYER = "model.layers.{i}."
FAMILY = Family(
    parse=parse,
    names=Names(
        {
            **PREFIXES,
            f"{LAYER}post_self_attn_layernorm.": "layers.{i}.post_attention_layernorm.",
            f"{LAYER}post_mlp_layernorm.": "layers.{i}.post_feedforward_layernorm.",
            f"{LAYER}post_attention_layernorm.": "layers.{i}.pre_feedforward_layernorm.",
        }
    ),
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    },
    interleaved_files=True,
    restore=partial(join, qkv=False, gate_up=True),
    small={
        "model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "attention_bias": True,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
    },
)  # fmt: skip
