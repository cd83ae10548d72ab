"""MiniCPM (1, 2 and 4, dense).

Llama's layers with scaled embeddings, residual updates and logits. Formula: the checkpoints' modeling_minicpm.py;
llama.cpp `conversion/minicpm.py`.
"""

from math import sqrt

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, number, real


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, {"num_experts": 0, "sparse_config": None})
    hidden = number(config, "hidden_size")
    depth = real(config, "scale_depth", sqrt(keys.num_layers(config)))
    narrower = hidden / number(config, "dim_model_base", default=hidden)
    return keys.stack(
        config,
        mixer=keys.biases(config, own_output=True),
        layers={"residual_scale": real(config, "residual_multiplier", depth / sqrt(keys.num_layers(config)))},
        embedding_scale=real(config, "embedding_multiplier", real(config, "scale_emb", 1.0)),
        logit_scale=1 / real(config, "logit_scale", narrower),
    )


FAMILY = Family(
    parse=parse,
    defaults={"max_position_embeddings": 2048, "tie_word_embeddings": True},
    harmless={"mup_denominator": "training only", "rope_scaling_type": "given by rope_scaling"},
    interleaved_rope=True,
    small={
        "model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], "scale_emb": 12, "scale_depth": 1.4,
        "dim_model_base": 16, "tie_word_embeddings": True, "head_dim": None,
    },
)  # fmt: skip
