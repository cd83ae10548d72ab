"""Nemotron-H, Nano v2, Nemotron 3 and 3.5 (Nano, Super, Lightning): layers of Mamba2, attention, MLP or experts alone.

Formula: transformers 5.23 `models/nemotron_h`, without its lower bound of steps in prefill (a key of training), as
vLLM, llama.cpp and the published code. MTP module: attention and experts (`mtp.layers.{0,1}`; vLLM 0.32
`nemotron_h_mtp.py`). GGUF names: llama.cpp `conversion/nemotron.py`, where the module is the layer after the trunk's.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from headstart.errors import ModelError
from headstart.heads.base import HeadSpec
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.moe import MoEConfig
from headstart.layers.parts import EmptyFeedForward, EmptyMixer, FeedForwardConfig, MixerConfig
from headstart.models import _mamba2, keys
from headstart.models._mamba2 import FULL, MAMBA
from headstart.models.base import Family
from headstart.models.keys import Config, flag, number, real
from headstart.models.mtp import MTPLayout
from headstart.models.names import Names
from headstart.models.small import SCRATCH_EXPERTS

MLP, MOE = "mlp", "moe"
LETTERS = {"M": MAMBA, "*": FULL, "E": MOE, "-": MLP}
KINDS = (MAMBA, FULL, MLP, MOE)
MODULE = (FULL, MOE)  # parts of the MTP module


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, {"mamba_proj_bias": False})
    kinds, config = _layers(config)
    eps = real(config, "layer_norm_epsilon", real(config, "layer_norm_eps", real(config, "rms_norm_eps", 1e-5)))
    head_dim = {"head_dim": config.get("head_dim") or config.get("attention_head_dim")}
    plain = keys.attention(keys.inside(config, head_dim))
    attention = replace(plain, rope=None)
    count = _num_mtp(config)
    feeds: dict[str, FeedForwardConfig] = {}
    if MLP in kinds:
        feeds[MLP] = _mlp(config)
    if MOE in kinds or count:
        feeds[MOE] = _experts(config)
    mixers: dict[str, MixerConfig] = {FULL: attention}
    if MAMBA in kinds:
        activation = _named(config, "mamba_hidden_act", "silu")
        mixers[MAMBA] = _mamba2.mixer(config, activation=keys.activation(activation), bias=flag(config, "use_bias"))
    layer = partial(LayerConfig, eps=eps)
    other = MLPConfig(inner=2 * number(config, "hidden_size"))  # of heads that are trained on it
    return keys.decoder(
        config,
        [layer(mixer=mixers.get(kind, EmptyMixer()), mlp=feeds.get(kind, EmptyFeedForward())) for kind in kinds],
        eps=eps,
        mtp_layer=layer(mixer=attention, mlp=feeds[MOE]) if count else layer(mixer=plain, mlp=other),
    )


def _named(config: Config, key: str, default: str) -> Config:
    """The config with the activation of `key` under `hidden_act`, which `keys.activation` reads."""
    return keys.inside(config, {"hidden_act": config.get(key) or default})


def _mlp(config: Config) -> MLPConfig:
    return keys.mlp(_named(config, "mlp_hidden_act", "relu2"), gated=False, bias=flag(config, "mlp_bias"))


def _experts(config: Config) -> MoEConfig:
    if flag(config, "mlp_bias"):
        raise ModelError("config.json: mlp_bias is true, which is not supported beside experts", "known: false")
    if (count := number(config, "n_shared_experts", default=1, least=0)) > 1:
        raise ModelError(f"config.json: n_shared_experts is {count}, which is not supported", "known: 0, 1")
    shared = number(config, "moe_shared_expert_intermediate_size", "shared_expert_intermediate_size") if count else 0
    renamed = keys.inside(_named(config, "mlp_hidden_act", "relu2"), {"n_shared_experts": 0, "use_expert_bias": True})
    latent = number(config, "moe_latent_size", default=0, least=0)
    return replace(keys.sigmoid_experts(renamed), shared=shared, gated=False, latent=latent)


def _num_mtp(config: Config) -> int:
    """Number of MTP modules: 0, or 1 of attention and experts. Raises ModelError for others."""
    count = keys.num_mtp(config)
    if not count:
        return 0
    pattern, named = config.get("mtp_hybrid_override_pattern"), config.get("mtp_layers_block_type")
    declared = [LETTERS.get(each, each) for each in pattern] if isinstance(pattern, str) else named or [*MODULE]
    kinds = [_mamba2.KINDS.get(str(kind), str(kind)) for kind in declared]
    if count > 1 or tuple(kinds) != MODULE:
        raise ModelError(
            f"config.json: {count} MTP modules of {', '.join(kinds)} are not supported",
            "known: one of full_attention, moe; the trunk alone runs with num_nextn_predict_layers 0",
        )
    return count


def _layers(config: Config) -> tuple[list[str], Config]:
    """(kind of each layer, config with numbers in place of a GGUF file's lists). Two of these lists determine the
    kinds: a layer with neither KV heads nor a feed-forward part is Mamba2."""
    declared = config.get("layers_block_type") or config.get("layer_types")
    pattern = config.get("hybrid_override_pattern")
    if isinstance(config.get("num_key_value_heads"), list) or config.get("model_type") in GGUF:
        count, part = keys.num_layers(config), MOE if config.get("num_experts") else MLP
        heads, inner = (_by_layer(config, key, count) for key in ("num_key_value_heads", "intermediate_size"))
        declared = [part if wide else FULL if kv else MAMBA for kv, wide in zip(heads, inner, strict=True)]
        numbers = {"num_key_value_heads": max(heads) or 1, "intermediate_size": max(inner)}
        return _mamba2.kinds(config, declared, KINDS), keys.inside(config, numbers)
    if isinstance(pattern, str) and declared is None:
        declared = [LETTERS.get(letter, letter) for letter in pattern]
    if not isinstance(declared, list) or not declared:
        raise ModelError("config.json names no layers", "layers_block_type or hybrid_override_pattern must say them")
    config = keys.inside(config, {"num_hidden_layers": len(declared)})
    return _mamba2.kinds(config, declared, KINDS), config


def _by_layer(config: Config, key: str, count: int) -> list[int]:
    """The number of each of `count` layers under a key that has one number, or a list that MTP modules may extend."""
    declared = config.get(key)
    listed: list[Any] = declared if isinstance(declared, list) else [declared] * count
    if len(listed) < count or not all(isinstance(each, int) and each >= 0 for each in listed):
        raise ModelError(f"config.json: {key} is {declared!r}, but must be a number for each of {count} layers")
    return listed[:count]


GGUF = ("nemotron_h_moe",)
PARTS = {
    **{f".mixer.{part}_proj.": f".self_attn.{part}_proj." for part in "qkvo"},
    ".mixer.in_proj.": ".mamba.in_proj.",
    ".mixer.out_proj.": ".mamba.out_proj.",
    ".mixer.conv1d.": ".mamba.conv.",
    ".mixer.dt_bias": ".mamba.step_bias",
    ".mixer.A_log": ".mamba.decay_rate",
    ".mixer.D": ".mamba.skip",
    ".mixer.norm.": ".mamba.norm.",
    **{f".mixer.{part}": f".mlp.{part}" for part in ("gate.", "experts.", "shared_experts.", "up_proj.", "down_proj.")},
    **{f".mixer.fc{i}_latent_proj.": f".mlp.fc{i}_latent_proj." for i in (1, 2)},
}
FAMILY = Family(
    parse=parse,
    defaults={"max_position_embeddings": 4096, "num_key_value_heads": 8},
    harmless={
        **_mamba2.HARMLESS,
        **dict.fromkeys(("norm_eps", "rms_norm_eps", "layer_norm_eps"), "given by layer_norm_epsilon"),
        **dict.fromkeys(("rope_theta", "partial_rotary_factor"), "positions are not rotated"),
        **dict.fromkeys(
            ("intermediate_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size", "mlp_hidden_act",
             "moe_latent_size", "n_routed_experts", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor",
             "n_group", "topk_group", "mlp_bias", "n_shared_experts", "expert_gating_func",
             "shared_expert_intermediate_size"),
            "of MLPs or experts, where there are any",
        ),
        **dict.fromkeys(
            ("mtp_hybrid_override_pattern", "mtp_layers_block_type"), "of the MTP module, where there is one"
        ),
        "moe_shared_expert_overlap": "in which order the same numbers are made",
        "hidden_act": "given by mlp_hidden_act",
        "attention_bias": "there are none: a tensor of one is refused",
        "num_hidden_layers": "given by the kinds of layers, as in transformers",
        "hybrid_override_pattern": "given by layers_block_type",
        "layer_types": "given by layers_block_type",
    },
    names=Names(
        {
            "backbone.": "",
            "backbone.embeddings.": "embed_tokens.",
            "backbone.norm_f.": "norm.",
            "backbone.layers.{i}.norm.": "layers.{i}.input_layernorm.",
            "lm_head.": "lm_head.",
            "mtp.layers.0.enorm.": "mtp.0.norm_embedding.",
            "mtp.layers.0.hnorm.": "mtp.0.norm_hidden.",
            "mtp.layers.0.eh_proj.": "mtp.0.projection.",
            "mtp.layers.0.norm.": "mtp.0.block.input_layernorm.",
            "mtp.layers.0.self_attn.": "mtp.0.block.self_attn.",
            "mtp.layers.1.norm.": "mtp.0.block.post_attention_layernorm.",
            "mtp.layers.1.mlp.": "mtp.0.block.mlp.",
            "mtp.layers.1.final_layernorm.": "mtp.0.norm.",
        },
        parts=PARTS,
        gguf=_mamba2.GGUF,
    ),
    head=HeadSpec(),
    mtp=MTPLayout(title="Nemotron-H", max_modules=1, rope="none", llama_cpp=GGUF),
    adapt=_mamba2.adapt,
    aliases=GGUF,
    nested=True,
    small={
        "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "ME*-",
        "num_hidden_layers": 4, "layer_norm_epsilon": 1e-5, "mamba_num_heads": 6, "mamba_head_dim": 16,
        "ssm_state_size": 12, "n_groups": 2, "conv_kernel": 4, "n_routed_experts": 7, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "moe_latent_size": 20,
        "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E",
        "time_step_min": 1e-9,
    },
    scratch={
        **SCRATCH_EXPERTS, "hybrid_override_pattern": "MEM*EM", "num_hidden_layers": 6, "n_routed_experts": 8,
        "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32, "n_groups": 1, "moe_latent_size": 64,
        "moe_shared_expert_intermediate_size": 128,
    },
)  # fmt: skip
