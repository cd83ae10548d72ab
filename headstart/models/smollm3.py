"""SmolLM3: Llama's layout, with layers that do not rotate positions (NoPE), every fourth one. No native MTP.

Formula: transformers 5.23 `models/smollm3`; llama.cpp's files do not tell which layers, and it takes every fourth.
"""

from __future__ import annotations

from dataclasses import replace

from headstart.errors import ModelError
from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag, number


def parse(config: Config) -> DecoderConfig:
    bias, count = flag(config, "attention_bias"), keys.num_layers(config)
    if (kinds := config.get("layer_types")) is not None:
        keys.check_kinds(kinds, count, (keys.FULL,))
    mixer = keys.attention(config, qkv_bias=bias, o_bias=flag(config, "attention_out_bias", bias))
    mlp = keys.mlp(config, bias=flag(config, "mlp_bias"))
    turned = keys.layer(config, mixer, mlp)
    plain = keys.layer(config, replace(mixer, rope=None), mlp)
    return keys.decoder(config, [turned if rotates else plain for rotates in _rotates(config, count)], mtp_layer=turned)


def _rotates(config: Config, count: int) -> list[int]:
    """Of each layer, does it rotate positions?"""
    every, told = number(config, "no_rope_layer_interval", default=4), config.get("no_rope_layers")
    if told is None:
        return [(i + 1) % every for i in range(count)]
    if not isinstance(told, list) or len(told) < count or any(each not in (0, 1) for each in told):
        raise ModelError(f"config.json: no_rope_layers must be 0 (not rotated) or 1 for each of {count} layers")
    return told[:count]


FAMILY = Family(
    parse=parse,
    defaults={"max_position_embeddings": 32768, "rope_theta": 2e6, "num_key_value_heads": 4},
    harmless={"max_window_layers": "of use_sliding_window only, which is refused"},
    interleaved_rope=True,
    small={
        "model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], "tie_word_embeddings": True,
        "no_rope_layers": [1, 0, 1],
    },
)  # fmt: skip
