"""GLM-4 of 0414 (9B, 32B, Z1), and the text part of GLM-4.1V.

Formula: transformers `models/glm4`, `models/glm4v`.
"""

from functools import partial

from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import NormPlacement
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.joined import join
from headstart.models.keys import Config, flag
from headstart.models.names import WRAPPED, Names


def parse(config: Config, norms: NormPlacement = "sandwich") -> DecoderConfig:
    config = keys.text_config(config)
    bias = flag(config, "attention_bias", True)
    return keys.stack(config, mixer={"qkv_bias": bias}, layers={"norms": norms})


FAMILY = Family(
    parse=parse,
    names=Names(
        {
            **WRAPPED,
            **{
                f"model.layers.{{i}}.{theirs}_layernorm.": f"layers.{{i}}.{ours}_layernorm."
                for theirs, ours in (
                    ("post_self_attn", "post_attention"),
                    ("post_mlp", "post_feedforward"),
                    ("post_attention", "pre_feedforward"),
                )
            },
        }
    ),
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    },
    interleaved_files=True,
    aliases=("glm4v", "glm4v_text"),
    restore=partial(join, qkv=False, gate_up=True),
    small={
        "model_type": "glm4", "architectures": ["Glm4ForCausalLM"], "attention_bias": True,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
    },
)  # fmt: skip
