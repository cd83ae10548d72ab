"""Kimi-Linear (48B-A3B): Kimi delta attention, and latent attention without rotary positions in every fourth layer.

Formula: transformers 5.24 `models/kimi_linear`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig
from headstart.layers.parts import MixerConfig
from headstart.models import _kda, _latent, keys
from headstart.models.base import Family
from headstart.models.keys import Config, number
from headstart.models.small import Arrays

LLAMA_CPP = "kimi-linear"
SERVED = {
    "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "use_grouped_topk": True,
}  # fmt: skip
THEIRS: Mapping[str, str] = {
    "num_experts_per_token": "num_experts_per_tok", "num_expert_group": "n_group", "moe_renormalize": "norm_topk_prob",
    "num_shared_experts": "n_shared_experts", "model_max_length": "max_position_embeddings",
}  # fmt: skip
EXPERT_PARTS: Mapping[str, str] = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def parse(config: Config) -> DecoderConfig:
    keys.refuse_gguf(config, LLAMA_CPP)
    keys.refuse_others(config, SERVED)
    config = with_usual_keys(config)
    kinds = _kda.kinds_of(config)
    if kinds is None:
        kinds = [_kda.FULL if i and i % 4 == 0 else _kda.LINEAR for i in range(keys.num_layers(config))]
    linear = _kda.mixer(
        config, heads=number(config, "linear_num_heads"), dim=number(config, "linear_head_dim"),
        width=number(config, "linear_conv_kernel_dim"), bound=0.0, low_rank=True,
    )  # fmt: skip
    mixers: dict[str, MixerConfig] = {_kda.FULL: replace(_latent.mixer(config), rope=None), _kda.LINEAR: linear}
    dense, sparse = keys.mlp(config), keys.sigmoid_experts(config)
    layers = keys.mixed_layers(config, [mixers[kind] for kind in kinds], dense, sparse, default=1)
    length = number(config, "max_position_embeddings", default=1048576)
    return keys.decoder(config, layers, max_length=length, mtp_layer=keys.layer(config, mixers[_kda.FULL], sparse))


def with_usual_keys(config: Config) -> Config:
    """The config with DeepSeek's names of Kimi's keys, and linear attention's keys at top level."""
    told = {ours: config.get(key) for key, ours in THEIRS.items()}
    return _kda.linear_config(keys.inside(config, {key: value for key, value in told.items() if value is not None}))


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: renames experts from Mixtral's names to DeepSeek's."""
    named: dict[str, RawTensor] = {}
    for written, tensor in tensors.items():
        name = written.replace(".block_sparse_moe.", ".mlp.")
        if match := re.fullmatch(r"(.+\.experts\.\d+)\.(w[123])\.(.+)", name):
            name = f"{match[1]}.{EXPERT_PARTS[match[2]]}.{match[3]}"
        named[name] = tensor
    return _kda.adapt(named, config, from_gguf)


def restore(arrays: Arrays, config: DecoderConfig, shape: tuple[int, ...] = (1, 1, -1, 1)) -> Arrays:
    """Family.restore: inverse of `adapt`. shape: of A_log."""
    theirs: Arrays = {}
    back = {ours: name for name, ours in EXPERT_PARTS.items()}
    for name, array in _kda.restore(arrays, config, shape).items():
        written = re.sub(r"\.mlp\.(gate\.|shared_experts|experts|routed_expert_)", r".block_sparse_moe.\1", name)
        if match := re.fullmatch(r"(.+\.experts\.\d+)\.(\w+_proj)\.(.+)", written):
            written = f"{match[1]}.{back[match[2]]}.{match[3]}"
        theirs[written] = array
    return theirs


FAMILY = Family(
    parse=parse,
    defaults={
        "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.446, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4,
    },
    harmless={
        **_latent.HARMLESS,
        **dict.fromkeys(("rope_theta", "rope_scaling", "max_position_embeddings"), "positions are not rotated"),
        **dict.fromkeys(THEIRS, "another key says it"),
    },
    adapt=adapt,
    restore=restore,
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
