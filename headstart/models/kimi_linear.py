"""Kimi-Linear (48B-A3B): Kimi delta attention, and latent attention without rotary positions in every fourth layer.

Formula: transformers 5.24 `models/kimi_linear`.
"""

from collections.abc import Mapping
from dataclasses import replace

from headstart.layers.build import DecoderConfig
from headstart.layers.parts import MixerConfig
from headstart.models import _kda, _latent, keys
from headstart.models.base import Family
from headstart.models.keys import Config, number
from headstart.models.names import DECAY, PREFIXES, SPARSE_BLOCK, Names

LLAMA_CPP = "kimi-linear"
SERVED = {
    "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "use_grouped_topk": True,
}  # fmt: skip
THEIRS: Mapping[str, str] = {
    "num_experts_per_token": "num_experts_per_tok", "num_expert_group": "n_group", "moe_renormalize": "norm_topk_prob",
    "num_shared_experts": "n_shared_experts", "model_max_length": "max_position_embeddings",
}  # fmt: skip


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, SERVED)
    config = _kda.of_gguf(config) if config.get("model_type") == LLAMA_CPP else with_usual_keys(config)
    kinds = _kda.kinds_of(config)
    if kinds is None:
        kinds = [_kda.FULL if i and i % 4 == 0 else _kda.LINEAR for i in range(keys.num_layers(config))]
    linear = _kda.low_rank_mixer(config, bound=0.0)
    mixers: dict[str, MixerConfig] = {_kda.FULL: replace(_latent.mixer(config), rope=None), _kda.LINEAR: linear}
    dense, sparse = keys.mlp(config), keys.sigmoid_experts(config)
    layers = keys.mixed_layers(config, [mixers[kind] for kind in kinds], dense, sparse)
    length = number(config, "max_position_embeddings", default=1048576)
    return keys.decoder(config, layers, max_length=length, mtp_layer=keys.layer(config, mixers[_kda.FULL], sparse))


def with_usual_keys(config: Config) -> Config:
    """The config with DeepSeek's names of Kimi's keys, and linear attention's keys at top level."""
    declared = {ours: config.get(key) for key, ours in THEIRS.items()}
    return _kda.linear_config(keys.inside(config, {key: value for key, value in declared.items() if value is not None}))


FAMILY = Family(
    parse=parse,
    defaults={
        "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.446, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4,
        "first_k_dense_replace": 1,
    },
    harmless={
        **_latent.HARMLESS,
        **dict.fromkeys(("rope_theta", "rope_scaling", "max_position_embeddings"), "positions are not rotated"),
        **dict.fromkeys(THEIRS, "given by another key"),
    },
    names=Names(PREFIXES, {**SPARSE_BLOCK, **DECAY}, gguf=_kda.GGUF),
    adapt=_kda.adapt,
    restore=lambda arrays, config: _kda.restore(arrays, config, shape=(1, 1, -1, 1)),
    aliases=(LLAMA_CPP,),
    small={
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "kv_lora_rank": 32,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10, "moe_intermediate_size": 24,
        "num_key_value_heads": 6, "num_hidden_layers": 4,
        "num_experts": 8, "num_experts_per_token": 3, "num_shared_experts": 1, "num_expert_group": 4, "topk_group": 2,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "max_position_embeddings": None,
        "model_max_length": 512, "linear_attn_config": {
            "full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 12, "num_heads": 5,
            "short_conv_kernel_size": 4},
    },
    scratch={
        "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32,
        "num_key_value_heads": 4, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_token": 2,
        "tie_word_embeddings": False,
        "linear_attn_config": {
            "full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 32, "num_heads": 4,
            "short_conv_kernel_size": 4},
    },
)  # fmt: skip
