"""SmolLM3: every fourth layer without rotary positions.

Formula: transformers 5.23 `models/smollm3`. GGUF files do not say which layers; llama.cpp takes every fourth.
"""

from dataclasses import replace

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag


def parse(config: Config) -> DecoderConfig:
    bias, count = flag(config, "attention_bias"), keys.num_layers(config)
    if (kinds := config.get("layer_types")) is not None:
        keys.check_kinds(kinds, count, (keys.FULL,))
    mixer = keys.attention(config, qkv_bias=bias, o_bias=flag(config, "attention_out_bias", bias))
    mlp = keys.mlp(config, bias=flag(config, "mlp_bias"))
    turned = keys.layer(config, mixer, mlp)
    plain = keys.layer(config, replace(mixer, rope=None), mlp)
    rotated = keys.rotated_layers(config, config.get("no_rope_layers"))
    return keys.decoder(config, [turned if each else plain for each in rotated], mtp_layer=turned)


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
