"""Granite 3 (dense).

Llama's layers with scaled embeddings, scores, residual updates and logits. Formula: transformers `models/granite`.
"""

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag, real


def parse(config: Config) -> DecoderConfig:
    scaling = real(config, "logits_scaling", real(config, "logit_scale", 1.0))
    return keys.stack(
        config,
        mixer={**keys.biases(config, own_output=True), "scale": real(config, "attention_multiplier", 1.0)},
        layers={"residual_scale": real(config, "residual_multiplier", 1.0)},
        feed_forward=keys.mlp(config, bias=flag(config, "mlp_bias")),
        embedding_scale=real(config, "embedding_multiplier", 1.0),
        logit_scale=1 / scaling,
    )


FAMILY = Family(
    parse=parse,
    defaults={"max_position_embeddings": 2048},
    interleaved_rope=True,
    small={
        "model_type": "granite", "architectures": ["GraniteForCausalLM"], "embedding_multiplier": 12.0,
        "attention_multiplier": 0.2, "residual_multiplier": 0.22, "logits_scaling": 0.4, "tie_word_embeddings": True,
        "head_dim": None,
    },
)  # fmt: skip
