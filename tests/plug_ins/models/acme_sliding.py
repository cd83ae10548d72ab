"""Windows in some layers, with a rope of their own; norms before and after each part; GELU; soft caps. The last layers
have queries only and read the keys and values of the last layer of their kind that has some."""

from __future__ import annotations

import math

from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, number
from headstart.models.names import Names

SLIDING = "sliding_attention"


def parse(config: Config) -> DecoderConfig:
    kinds = config["layer_types"]
    num_own = len(kinds) - number(config, "num_kv_shared_layers", default=0, least=0)

    def layer(index: int) -> LayerConfig:
        kind = kinds[index]
        before = [earlier for earlier in range(min(index, num_own)) if kinds[earlier] == kind]
        mixer = keys.attention(
            {**config, "rope_theta": config["rope_local_base_freq"]} if kind == SLIDING else config,
            window=number(config, "sliding_window") if kind == SLIDING else 0,
            softcap=float(config["attn_logit_softcapping"]),
            qk_norm=True,
            sinks=keys.flag(config, "attention_sinks"),
            **({} if kind == SLIDING or keys.flag(config, "rope_everywhere", True) else {"rope": None}),
            shares=before[-1] if index >= num_own else None,
        )
        mlp = keys.mlp(config, gated=keys.flag(config, "mlp_gate", True))
        scale = float(config.get("residual_multiplier", 1.0))
        return keys.layer(config, mixer, mlp, norms=config.get("norm_places", "sandwich"), residual_scale=scale)

    return keys.decoder(
        config,
        [layer(index) for index in range(len(kinds))],
        embedding_scale=math.sqrt(number(config, "hidden_size")),
        logit_softcap=float(config["final_logit_softcapping"]),
    )


NAMES = Names(
    {
        "decoder.tokens.": "embed_tokens.",
        "decoder.norm.": "norm.",
        "decoder.h.{i}.attn.": "layers.{i}.self_attn.",
        "decoder.h.{i}.attn_norm.": "layers.{i}.input_layernorm.",
        "decoder.h.{i}.attn_out_norm.": "layers.{i}.post_attention_layernorm.",
        "decoder.h.{i}.mlp_norm.": "layers.{i}.pre_feedforward_layernorm.",
        "decoder.h.{i}.mlp_out_norm.": "layers.{i}.post_feedforward_layernorm.",
        "decoder.h.{i}.": "layers.{i}.",
    }
)
FAMILY = Family(
    parse=parse,
    names=NAMES,
    small={
        "model_type": "acme_sliding", "hidden_act": "gelu_pytorch_tanh", "sliding_window": 11, "head_dim": 16,
        "layer_types": [SLIDING, SLIDING, "full_attention", SLIDING, "full_attention", SLIDING],
        "num_kv_shared_layers": 3, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0, "tie_word_embeddings": True,
    },
)  # fmt: skip
