"""Phi-3, Phi-3.5 and Phi-4 (mini and 14B).

Formula: transformers `models/phi3`. Older files call LongRoPE `su`, or `yarn`.
"""

from functools import partial

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.joined import join
from headstart.models.keys import Config


def parse(config: Config) -> DecoderConfig:
    return keys.stack(config, windows=keys.windows_in_turn(config))


FAMILY = Family(
    parse=parse,
    defaults={"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    harmless={
        "original_max_position_embeddings": "of LongRoPE, which reads it",
        "attention_bias": "no file has one",
        "interpolate_factor": "said and not used", "full_attn_mod": "said and not used", "lm_head_bias": "none",
        "mlp_bias": "no file has one",
    },
    restore=partial(join, qkv=True, gate_up=True),
    small={"model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "sliding_window": 40, "head_dim": None},
)  # fmt: skip
