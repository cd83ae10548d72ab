"""SmolLM3: every fourth layer without rotary positions.

Formula: transformers 5.23 `models/smollm3`. GGUF files do not say which layers; llama.cpp takes every fourth.
"""

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag


def parse(config: Config) -> DecoderConfig:
    if (kinds := config.get("layer_types")) is not None:
        keys.check_kinds(kinds, keys.num_layers(config), (keys.FULL,))
    mixer, feed = keys.biases(config, own_output=True), keys.mlp(config, bias=flag(config, "mlp_bias"))
    return keys.stack(
        config, rotated=keys.rotated_layers(config, config.get("no_rope_layers")), mixer=mixer, feed_forward=feed,
        mtp_layer=keys.layer(config, keys.attention(config, **mixer), feed),
    )  # fmt: skip


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
