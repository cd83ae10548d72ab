"""Muse-Glimmer (30B), text part: gated attention with windows, in every fourth layer without windows and rotary
positions; norms of queries and keys without weights, and normed embeddings.

Formula: transformers 5.24 `models/muse_glimmer`. Norms of layers are 1 + w in files, the final one is not.
"""

import re

from headstart.errors import ModelError
from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, number, real
from headstart.models.names import GGUF_GATE, WRAPPED, Names

LLAMA_CPP = "muse-glimmer"


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    gguf = config.get("model_type") == LLAMA_CPP
    if gguf:
        config = _of_gguf(config)
    count, window = keys.num_layers(config), number(config, "sliding_window", default=2048)
    unlisted = [keys.SLIDING if (count - 1 - i) % 4 else keys.FULL for i in range(count)]
    kinds = keys.layer_kinds(config, (keys.FULL, keys.SLIDING), unlisted)
    thetas = config.get("layer_rope_theta")
    if thetas is None:
        thetas = [(count - 1 - i) % 4 for i in range(count)]
    elif not isinstance(thetas, list) or len(thetas) != count or len({each for each in thetas if each}) > 1:
        raise ModelError(f"config.json: layer_rope_theta must be 0 or one base for each of {count} layers")
    head_dim = number(config, "head_dim")
    return keys.stack(
        config, windows=[window if kind == keys.SLIDING else 0 for kind in kinds], rotated=list(map(bool, thetas)),
        mixer={
            "qk_norm": True, "qk_norm_unweighted": not gguf, "gated": True,
            "scale": real(config, "qk_scale_factor", 3.87) * head_dim**-0.5,
        },
        layers={"norms": "sandwich", "post_eps": real(config, "post_norm_eps", 1e-8)},
        embedding_norm=True, logit_scale=real(config, "output_multiplier", 0.19611613513818404),
        logit_softcap=real(config, "final_logit_softcapping", 20.0),
    )  # fmt: skip


def _of_gguf(config: Config) -> Config:
    """The keys of a GGUF file, in which the norm of queries has the factor on scores and layers with windows rotate."""
    flags = keys.layer_flags(config, "sliding_window_pattern", config.get("sliding_window_pattern"))
    theta = real(config, "rope_theta", 10000.0)
    return keys.inside(config, {
        "layer_types": [keys.SLIDING if each else keys.FULL for each in flags],
        "layer_rope_theta": [theta if each else 0 for each in flags],
        "qk_scale_factor": 1.0, "output_multiplier": config.get("logit_scale"),
    })  # fmt: skip


OUTSIDE = ("vision_adapter.", "vision_projection.", "vision_model.", "vision_encoder.")
FAMILY = Family(
    parse=parse,
    defaults={
        "vocab_size": 202048, "hidden_size": 6656, "intermediate_size": 19968, "num_hidden_layers": 52,
        "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072, "rope_theta": 10000.0,
    },
    harmless={
        "hidden_act": "given by hidden_activation",
        **dict.fromkeys(("out_hidden_size", "projector_hidden_size", "projector_hidden_act"), "of images"),
    },
    names=Names({**WRAPPED, **dict.fromkeys(OUTSIDE)}, gguf=GGUF_GATE),
    shifted_norms=re.compile(r"^layers\..*norm\.weight$"),
    aliases=("muse_glimmer_text", LLAMA_CPP),
    interleaved_rope=True,
    small={
        "model_type": "muse_glimmer_text", "architectures": ["MuseGlimmerForConditionalGeneration"], "head_dim": 16,
        "num_hidden_layers": 5, "sliding_window": 11, "post_norm_eps": 1e-3, "qk_scale_factor": 2.5,
        "output_multiplier": 0.5, "final_logit_softcapping": 4.0, "hidden_activation": "silu", "hidden_act": None,
    },
)  # fmt: skip
