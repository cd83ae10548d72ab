"""Granite 4 (hybrid and dense) and Granite 3 with experts: Mamba2 and attention layers.

Formula: transformers 5.23 `models/granitemoehybrid`; GGUF names: llama.cpp `conversion/granite.py`.
"""

from dataclasses import replace

from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.moe import MoEConfig
from headstart.layers.parts import MixerConfig
from headstart.models import _mamba2, keys
from headstart.models._mamba2 import FULL, MAMBA
from headstart.models.base import Family
from headstart.models.joined import join, split_joined, stacked_experts
from headstart.models.keys import Config, flag, number, real
from headstart.models.names import PREFIXES, Names
from headstart.models.small import Arrays

ALL_ROTATED = ("granitemoe", "granitemoeshared")  # Granite 3's experts


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, {"normalization_function": "rmsnorm"})
    kinds, kv_heads = _kinds(config)
    config = keys.inside(config, {"num_key_value_heads": kv_heads})
    eps = real(config, "rms_norm_eps", 1e-6)
    plain = keys.attention(config)  # of heads that are trained on it
    attention = keys.attention(
        config, scale=real(config, "attention_multiplier", 1.0), rotated=_rotated(config),
        **keys.biases(config, own_output=True),
    )  # fmt: skip
    mixers: dict[str, MixerConfig] = {FULL: attention}
    if MAMBA in kinds:
        mixers[MAMBA] = _mamba2.mixer(config, activation=keys.activation(config), bias=flag(config, "mamba_proj_bias"))
    feed, residual = _feed_forward(config), real(config, "residual_multiplier", 1.0)
    inner = feed.shared or feed.inner if isinstance(feed, MoEConfig) else feed.inner
    scaling = real(config, "logits_scaling", real(config, "logit_scale", 1.0))
    return keys.decoder(
        config,
        [keys.layer(config, mixers[kind], feed, residual_scale=residual) for kind in kinds],
        embedding_scale=real(config, "embedding_multiplier", 1.0),
        logit_scale=1 / scaling,
        mtp_layer=keys.layer(config, plain, MLPConfig(inner=inner), eps=eps),
    )


def _kinds(config: Config) -> tuple[list[str], object]:
    """(MAMBA or FULL for each layer, number of KV heads)."""
    declared, (attends, kv_heads) = config.get("layer_types"), keys.attending(config)
    if attends is not None:
        declared = [FULL if each else MAMBA for each in attends]
    if declared is None:
        known = config.get("model_type") in ("granitemoehybrid", "granitehybrid")
        declared = [MAMBA if known else FULL] * keys.num_layers(config)
    return _mamba2.kinds(config, declared), kv_heads


def _rotated(config: Config) -> bool:
    """True if attention has RoPE: by `position_embedding_type`, or a GGUF file's own key. Granite 3 always has it."""
    rotated = config.get("position_embedding_type") == "rope"
    return flag(config, "rope_finetuned", rotated or config.get("model_type") in ALL_ROTATED)


def _feed_forward(config: Config) -> MLPConfig | MoEConfig:
    """Experts with a shared expert, or only an MLP of the shared expert's size."""
    shared = number(config, "shared_intermediate_size", "shared_expert_intermediate_size", default=0, least=0)
    if not number(config, "num_local_experts", "num_experts", default=0, least=0):
        inner = shared or number(config, "intermediate_size")
        return MLPConfig(inner=inner, activation=keys.activation(config))
    inner = number(config, "intermediate_size")
    return replace(keys.softmax_experts(config, inner=inner), shared=shared)


SHARED = ".mlp.shared_experts."


def _dense(config: DecoderConfig) -> set[str]:
    return {f"layers.{i}" for i, layer in enumerate(config.layers) if isinstance(layer.mlp, MLPConfig)}


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: in layers without experts the shared expert is the MLP. Fused gate and up are split."""
    dense = _dense(config)
    named = {
        name.replace(SHARED, ".mlp.") if name.partition(SHARED)[0] in dense else name: tensor
        for name, tensor in tensors.items()
    }
    return split_joined(_mamba2.adapt(named, config, from_gguf), config)


def restore(arrays: Arrays, config: DecoderConfig) -> Arrays:
    """Family.restore: fuses gate and up, stacks experts, and names dense MLPs as shared experts."""
    dense = _dense(config)
    joined = join(arrays, config, qkv=False, gate_up=True)
    return {
        name.replace(".mlp.", SHARED) if name.partition(".mlp.")[0] in dense else name: array
        for name, array in stacked_experts(joined, config).items()
    }


FAMILY = Family(
    parse=parse,
    defaults={"max_position_embeddings": 2048, "num_experts_per_tok": 2},
    harmless={
        **_mamba2.HARMLESS,
        **dict.fromkeys(
            ("intermediate_size", "num_experts_per_tok", "shared_intermediate_size", "shared_expert_intermediate_size"),
            "of experts or a dense part, where there are any",
        ),
        **dict.fromkeys(
            ("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_conv_bias",
             "mamba_proj_bias", "time_step_limit", "linear_num_value_heads", "linear_num_key_heads",
             "linear_key_head_dim", "linear_conv_kernel_dim"),
            "of Mamba2, where there is any",
        ),
        "position_embedding_type": "given by attention",
    },
    names=Names(
        PREFIXES,
        parts={
            **_mamba2.PARTS,
            ".block_sparse_moe.router.layer.": ".mlp.gate.",
            ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
            ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
            ".shared_mlp.input_linear.": ".mlp.shared_experts.gate_up_proj.",
            ".shared_mlp.output_linear.": ".mlp.shared_experts.down_proj.",
        },
        gguf=_mamba2.GGUF,
    ),
    interleaved_rope=True,
    adapt=adapt,
    restore=restore,
    aliases=("granitehybrid", *ALL_ROTATED),
    small={
        "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "position_embedding_type": "nope",
        "embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22, "logits_scaling": 0.4,
        "head_dim": None, "intermediate_size": 24, "num_local_experts": 7, "num_experts_per_tok": 3,
        "shared_intermediate_size": 40, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 12,
        "mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_expand": 2,
    },
    scratch={
        "num_experts_per_tok": 2, "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "intermediate_size": 64, "shared_intermediate_size": 128, "num_local_experts": 8, "mamba_n_heads": 8,
        "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1,
    },
)  # fmt: skip
