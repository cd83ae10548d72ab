"""LFM2 and LFM2.5 (dense): short convolutions and attention."""

from headstart.layers.build import DecoderConfig
from headstart.layers.mlp import MLPConfig
from headstart.models import _short_conv
from headstart.models.base import Family
from headstart.models.keys import Config, flag, number, real


def parse(config: Config) -> DecoderConfig:
    mlp = MLPConfig(inner=_inner(config))
    return _short_conv.parse(config, mlp, lambda index: mlp)


def _inner(config: Config) -> int:
    """Intermediate size of the MLP: by default two thirds of the config's value, rounded up to a multiple."""
    inner = number(config, "block_ff_dim", "intermediate_size")
    factor, multiple = real(config, "block_ffn_dim_multiplier", 1.0), number(config, "block_multiple_of", default=256)
    if not flag(config, "block_auto_adjust_ff_dim", True):
        return inner
    return -(-int(factor * int(2 * inner / 3)) // multiple) * multiple


FAMILY = Family(
    parse=parse,
    defaults=_short_conv.DEFAULTS,
    harmless={**_short_conv.HARMLESS, "intermediate_size": "given by block_ff_dim"},
    names=_short_conv.NAMES,
    small={
        "model_type": "lfm2", "architectures": ["Lfm2ForCausalLM"], "norm_eps": 1e-5, "full_attn_idxs": [1],
        "conv_L_cache": 3, "block_multiple_of": 8, "tie_word_embeddings": True,
    },
)  # fmt: skip
