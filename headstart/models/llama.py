"""Llama and the many checkpoints that use its layout (SmolLM2 among them). No native MTP."""

from __future__ import annotations

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag


def parse(config: Config) -> DecoderConfig:
    bias = flag(config, "attention_bias")
    mixer, mlp = keys.attention(config, qkv_bias=bias, o_bias=bias), keys.mlp(config, bias=flag(config, "mlp_bias"))
    return keys.decoder(config, [keys.layer(config, mixer, mlp)] * keys.num_layers(config))


FAMILY = Family(
    parse=parse,
    interleaved_rope=True,
    small={"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
)
