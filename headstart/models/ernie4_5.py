"""ERNIE 4.5 (0.3B, dense).

Llama's layers with interleaved rotary pairs. Formula: transformers `models/ernie4_5`.
"""

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag


def parse(config: Config) -> DecoderConfig:
    bias = flag(config, "use_bias", flag(config, "attention_bias"))
    mixer = {"qkv_bias": bias, "o_bias": flag(config, "attention_out_bias", bias)}
    return keys.stack(config, mixer=mixer, feed_forward=keys.mlp(config, bias=flag(config, "mlp_bias", bias)))


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    interleaved_files=True,
    aliases=("ernie4-5",),
    small={"model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"], "tie_word_embeddings": True},
)  # fmt: skip
