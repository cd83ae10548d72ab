"""Ling 3 (Bailing MoE V3): Kimi delta attention, and latent attention with a gate for each head in the last layer of a
group.

Formula: transformers 5.24 `models/bailing_hybrid`. MTP module: vLLM 0.32 `bailing_moe_mtp.py`, as Ling 2's: e first, a
layer of latent attention with experts, `final_layernorm`, whose result is recycled. Ling 2.5 has lightning attention in
place of Kimi delta attention, and is refused.
"""

from dataclasses import replace

from headstart.errors import ModelError
from headstart.heads.base import HeadSpec
from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig
from headstart.layers.parts import MixerConfig
from headstart.models import _kda, _latent, bailing_moe, keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag, number
from headstart.models.mtp import MTPLayout
from headstart.models.names import Names

LLAMA_CPP = "bailingmoe3"
SERVED = {
    **bailing_moe.SERVED, "use_bias": False, "use_qkv_bias": False, "score_function": "sigmoid", "linear_silu": True,
    "mtp_use_kda": False, "no_kda_lora": True,
    **dict.fromkeys(
        ("use_kda_lora", "use_mla_nope", "use_nGPT", "value_norm", "up_proj_norm", "scale_router_input"), False
    ),
}  # fmt: skip
LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list", "swiglu_limits", "swiglu_limits_shared")
IN_GGUF = {
    "head_dim": "linear_head_dim", "short_conv_kernel_size": "linear_conv_kernel_dim",
    "kda_lower_bound": "linear_lower_bound", "kda_safe_gate": "linear_safe_gate",
}  # fmt: skip
"""Keys -> those of GGUF files."""
GATES = {None: 0, "head_wise": 1, "element_wise": 2}


def parse(config: Config) -> DecoderConfig:
    if config.get("model_type") == LLAMA_CPP:
        config = _kda.of_gguf(config)
        config = keys.inside(config, {key: config.get(name) for key, name in IN_GGUF.items()})
    if config.get("short_conv_kernel_size") is None or config.get("kv_lora_rank") is None:
        raise ModelError("lightning attention (Ling 2.5) is not supported", "known: Kimi delta attention (Ling 3)")
    keys.refuse_others(config, SERVED)
    for key in LIMITS:
        limits = config.get(key)
        if any(limits) if isinstance(limits, list) else limits:
            raise ModelError(f"config.json: {key} limits activations of experts, which is not supported")
    config = keys.renamed(config, {"n_shared_experts": "num_shared_experts"})
    latent = _latent.mixer(config)
    gate = config.get("gated_attention_proj_granularity_type", "head_wise")
    if gate not in GATES:
        raise ModelError(f"config.json: gated_attention_proj_granularity_type is {gate!r}", "known: head_wise")
    num_gates = (0, latent.num_heads, latent.num_heads * latent.value)[GATES[gate]]
    linear = _kda.mixer(
        config, heads=number(config, "linear_num_heads", default=latent.num_heads), dim=number(config, "head_dim"),
        width=number(config, "short_conv_kernel_size"),
        bound=_kda.bound_of(config, "kda_lower_bound", safe=flag(config, "kda_safe_gate", True)),
    )  # fmt: skip
    mixers: dict[str, MixerConfig] = {_kda.FULL: replace(latent, num_gates=num_gates), _kda.LINEAR: linear}
    dense, sparse = keys.mlp(config), keys.sigmoid_experts(config)
    layers = keys.mixed_layers(config, [mixers[kind] for kind in _kinds(config)], dense, sparse)
    return keys.decoder(config, layers, mtp_layer=keys.layer(config, mixers[_kda.FULL], sparse))


def _kinds(config: Config) -> list[str]:
    """Kind of each layer. Without a list, the last layer of each group has full attention, as all layers after the last
    whole group."""
    if (kinds := _kda.kinds_of(config)) is not None:
        return kinds
    count, group = keys.num_layers(config), number(config, "layer_group_size", default=6)
    first = count // group * group
    return [_kda.FULL if (i + 1) % group == 0 or i >= first else _kda.LINEAR for i in range(count)]


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: GGUF files have the decay rates without their sign."""
    ours = _kda.adapt(tensors, config, from_gguf)
    return {
        name: each.affine(-1, 0) if from_gguf and name.endswith(".decay_rate") else each for name, each in ours.items()
    }


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 262144, "rope_theta": 6000000.0, "rms_norm_eps": 1e-6, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "n_shared_experts": 1, "first_k_dense_replace": 2, "head_dim": 128,
        "routed_scaling_factor": 2.5, "kda_lower_bound": -5.0,
    },
    harmless={
        **_latent.HARMLESS,
        **bailing_moe.HARMLESS,
        **dict.fromkeys(("rotary_dim", "partial_rotary_factor"), "given by qk_rope_head_dim"),
        **dict.fromkeys(("group_norm_size", "num_kv_heads_for_linear_attn", "use_qk_norm"), "of lightning attention"),
    },
    names=Names(
        bailing_moe.NAMES.prefixes,
        parts={
            **bailing_moe.NAMES.parts,
            ".attention.g_proj.": ".self_attn.gate_proj.",
            ".attention.": ".self_attn.",
            **_kda.PARTS,
        },
        gguf={**_kda.GGUF, ".f_a_proj.": ".f_proj.", ".g_a_proj.": ".gate_proj."},
    ),
    adapt=adapt,
    restore=_kda.restore,
    head=HeadSpec(),
    mtp=MTPLayout(
        title="Ling 3 (Bailing MoE V3)", architectures=("bailingmoev3",), llama_cpp=(LLAMA_CPP,), served=1,
    ),
    aliases=("bailing_moe_v3", LLAMA_CPP),
    small={
        "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"], **_latent.SMALL,
        "q_lora_rank": None, "head_dim": 12, "n_routed_experts": None, "num_experts": 8, "n_shared_experts": None,
        "num_shared_experts": 1, "layer_group_size": 2, "num_hidden_layers": 4, "short_conv_kernel_size": 4,
        "kda_safe_gate": True, "kda_lower_bound": -3.0, "score_function": "sigmoid", "rope_theta": 6000000.0,
    },
)  # fmt: skip
