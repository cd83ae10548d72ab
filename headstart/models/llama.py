"""Llama, and other checkpoints of its layout (SmolLM2); SmolVLM and Idefics3."""

from headstart.layers.build import DecoderConfig
from headstart.layers.parts import FeedForwardConfig
from headstart.models import _smolvlm, keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag, number
from headstart.models.names import WRAPPED, Names


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    keys.refuse_others(config, dict.fromkeys(("rope_interleaved", "qk_layer_norms", "use_resampler"), False))
    feed: FeedForwardConfig = keys.mlp(config, bias=flag(config, "mlp_bias"))
    if number(config, "num_experts", default=0, least=0):  # llama.cpp calls Mixtral so
        feed = keys.softmax_experts(config, inner=number(config, "intermediate_size"))
    return keys.stack(config, mixer=keys.biases(config, own_output=True), feed_forward=feed)


FAMILY = Family(
    parse=parse,
    defaults={"max_position_embeddings": 2048},
    harmless={
        "is_llama_config": "SmolLM2's name for this layout",
        "max_sequence_length": "given by max_position_embeddings",
        "neftune_noise_alpha": "training only",
        **dict.fromkeys(("scale_factor", "pixel_shuffle_factor", "perceiver_config"), "of images"),
    },
    names=Names({**WRAPPED, "connector.": None}),
    vision=_smolvlm.VISION,
    aliases=("smolvlm", "idefics3"),
    interleaved_rope=True,
    small={"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
)
