"""Common part of dense LFM2 and LFM2 with experts: layers of gated short convolutions or of attention.

Formulas: transformers 5.23, `models/lfm2` and `models/lfm2_moe`; names in GGUF files: llama.cpp's `conversion/lfm2.py`.
No native MTP: the published drafters (DSpark) are block drafters.
"""

from collections.abc import Callable
from typing import Any

from headstart.errors import ModelError
from headstart.layers.build import DecoderConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.parts import FeedForwardConfig, MixerConfig
from headstart.layers.short_conv import ShortConvConfig
from headstart.models import keys
from headstart.models.keys import MAX_TAPS, Config, flag, number, real
from headstart.models.names import PREFIXES, Names

CONV, FULL = "conv", keys.FULL
NAMES = Names(
    {**PREFIXES, "model.embedding_norm.": "norm."},
    parts={
        ".feed_forward.expert_bias": ".mlp.gate.e_score_correction_bias",
        ".feed_forward.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w3.": ".up_proj.",
        ".w2.": ".down_proj.",
        ".operator_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".q_layernorm.": ".q_norm.",
        ".k_layernorm.": ".k_norm.",
    },
)


def parse(config: Config, dense: MLPConfig, feed_forward: Callable[[int], FeedForwardConfig]) -> DecoderConfig:
    """Family.parse. dense: feed-forward part without experts. feed_forward: layer index -> its feed-forward part."""
    keys.refuse_others(config, {"conv_bias": False, "block_use_swiglu": True, "use_pos_enc": True})
    kinds, kv_heads = _kinds(config)
    eps = real(config, "norm_eps", real(config, "rms_norm_eps", 1e-5))
    width = number(config, "conv_L_cache", default=3)
    if not 2 <= width <= MAX_TAPS:
        raise ModelError(f"config.json: conv_L_cache is {width}, but must be 2 to {MAX_TAPS}")
    attention = keys.attention(keys.inside(config, {"num_key_value_heads": kv_heads}), qk_norm=True)
    mixers: dict[str, MixerConfig] = {FULL: attention, CONV: ShortConvConfig(number(config, "hidden_size"), width)}
    layers = [keys.layer(config, mixers[kind], feed_forward(i), eps=eps) for i, kind in enumerate(kinds)]
    tied = config.get("tie_embedding")
    return keys.decoder(
        config,
        layers,
        eps=eps,
        tied=flag(config, "tie_word_embeddings", True) if tied is None else flag(config, "tie_embedding"),
        mtp_layer=keys.layer(config, attention, dense, eps=eps),
    )


def _kinds(config: Config) -> tuple[list[str], int]:
    """(CONV or FULL for each layer, number of KV heads)."""
    count, (attends, kv_heads), full = keys.num_layers(config), keys.attending(config), config.get("full_attn_idxs")
    kinds = config.get("layer_types")
    if attends is not None:
        kinds = [FULL if each else CONV for each in attends]
    if kinds is None:
        if full is not None and not isinstance(full, list):
            raise ModelError(f"config.json: full_attn_idxs is {full!r}, but must be a list of layers")
        kinds = [FULL if full is None or i in full else CONV for i in range(count)]
    keys.check_kinds(kinds, count, (FULL, CONV))
    return kinds, number({"num_key_value_heads": kv_heads}, "num_key_value_heads", default=8)


HARMLESS = {
    **dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), "given by hidden_size"),
    "num_heads": "given by num_attention_heads",
    "block_norm_eps": "given by norm_eps",
    "theta": "given by rope_theta",
    **dict.fromkeys(
        ("block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"),
        "training only",
    ),
    "attention_bias": "there are none: a tensor of one is refused",
    **dict.fromkeys(("hidden_act", "mlp_bias"), "the feed-forward part is always SwiGLU without biases"),
    "full_attn_idxs": "given by layer_types",
    **dict.fromkeys(("conv_L_cache", "num_key_value_heads"), "used only by layers of that kind"),
}
DEFAULTS: dict[str, Any] = {"max_position_embeddings": 128_000, "rope_theta": 1e6}
