"""Gemma 2 (2B, 9B, 27B).

Formula: transformers 5.23 `models/gemma2`; GGUF names and folded norms: llama.cpp `conversion/gemma.py`; attention
scale there: `models/gemma2.cpp`.
"""

import math

from headstart.layers.build import DecoderConfig
from headstart.models import _gemma, keys
from headstart.models.base import Family
from headstart.models.keys import Config, number, real
from headstart.models.names import ALL_NORMS

LAYERS_27B = 46  # of which llama.cpp knows 27B


def parse(config: Config) -> DecoderConfig:
    _gemma.refuse_bidirectional(config)
    window = number(config, "sliding_window")
    mixer = {
        "scale": _gemma.score_scalar(config, LAYERS_27B) ** -0.5,
        "softcap": real(config, "attn_logit_softcapping", 0.0),
        **keys.biases(config),
    }
    return keys.stack(
        config, windows=[window if kind == keys.SLIDING else 0 for kind in keys.kinds_in_turn(config, 2)], mixer=mixer,
        layers={"norms": "sandwich"}, embedding_scale=math.sqrt(number(config, "hidden_size")),
        logit_softcap=real(config, "final_logit_softcapping", 0.0),
    )  # fmt: skip


FAMILY = Family(
    parse=parse,
    names=_gemma.NAMES,
    shifted_norms=ALL_NORMS,
    defaults={
        **_gemma.DEFAULTS, "vocab_size": 256000, "num_hidden_layers": 26, "max_position_embeddings": 8192,
        "rope_theta": 10000.0, "query_pre_attn_scalar": 256, "sliding_window": 4096, "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    harmless={
        "hidden_act": "given by hidden_activation", "sliding_window_size": "given by sliding_window",
    },
    small={
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "sliding_window": 11,
        "query_pre_attn_scalar": 20, "tie_word_embeddings": True, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 4.0,
    },
)  # fmt: skip
