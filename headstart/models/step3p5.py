"""Step-3.5-Flash, and the text parts of Step-3.7 and Step-5: windows, indexers (Step-5), experts, three MTP modules.

Formula: transformers 5.23 `models/step3p7`, whose text config is called step3p5. Norms are 1 + w. A layer's limit caps
silu(gate) and clamps the other factor; routed and shared experts have limits of their own (dense layers: the latter).
MTP modules: vLLM 0.32 `step3p5_mtp.py`, llama.cpp b11434 `step35.cpp`: the layers after the trunk's, with an LM head
each. They read the trunk's stream before its final norm (vLLM: after it) and recycle their block's output. Draft step i
runs module i modulo their number (vLLM).

Step-5: vLLM 0.33 `models/step5`, whose indexers round queries and keys to FP8 (here they do not). Indexers of full
layers select `topk` regions of `region_block_size` positions for each KV head (layers/indexer.py). `ssmax_s` is not
used (vLLM).
"""

import re
from dataclasses import replace
from typing import Any

import numpy as np

from headstart.errors import ModelError
from headstart.heads.base import HeadSpec
from headstart.kernels.ops import Activation, RawTensor, RouterSpec
from headstart.kernels.specs import IndexSpec
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.indexer import IndexerConfig
from headstart.layers.rope import rope_spec
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.joined import grouped_experts
from headstart.models.keys import DENSE, FULL, SLIDING, SPARSE, Config, flag, number, real
from headstart.models.mtp import MTPLayout
from headstart.models.names import GGUF_GATE, WRAPPED, Names
from headstart.models.reading import Reading
from headstart.models.small import SCRATCH_EXPERTS, Arrays

LLAMA_CPP = "step35"
SERVED = {
    "zero_centered": True, "use_moe": True, "use_moe_router_bias": True, "moe_router_activation": "sigmoid",
    "use_head_wise_attn_gate": True, "norm_expert_weight": True, "moe_every_n_layer": 1, "moe_layer_offset": 0,
    "sink": False, "use_mfa": False, "att_impl_type": "GQA", "use_bidirectional_attention": False,
}  # fmt: skip
LIMITS: dict[float, Activation] = {0.0: "silu", 7.0: "silu_7", 16.0: "silu_16"}
"""Limit of a layer in the config -> its activation."""
FIRST_SPARSE = 3
SPARSE_SERVED = {
    "apply_to_layer_types": [FULL], "compression_method": "csa_block_compress", "attention_impl": "sparse_gqa",
    "sparse_indexer_num_k_heads": 1, "sparse_indexer_use_rope": True, "sparse_indexer_q_norm_type": "rmsnorm",
    "sparse_indexer_k_norm_type": "layernorm", "sparse_indexer_csa_z_norm_type": "none",
}  # fmt: skip
SPARSE_SIZES = {
    "sparse_indexer_num_heads": 16, "proxy_dim": 256, "sparse_indexer_rope_dim": 32, "topk": 512,
    "region_block_size": 8,
}  # fmt: skip
"""Keys in `sparse_config` -> the default."""


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    keys.refuse_others(config, SERVED)
    count, modules = keys.num_layers(config), keys.num_mtp(config)
    kinds, sparse = _kinds(config, count + modules), _sparse(config, count + modules)
    ropes = _ropes(config, kinds)
    mixers = {kind: _attention(ropes[kind], kind, kinds.index(kind)) for kind in {*kinds}}
    routed, shared = (_limits(config, key, count + modules) for key in ("swiglu_limits", "swiglu_limits_shared"))
    layers = [
        _layer(config, mixers[kind], each, routed[i], shared[i])
        for i, (kind, each) in enumerate(zip(kinds, sparse, strict=True))
    ]
    heads = layers[count:]
    if any(head != heads[0] for head in heads):
        raise ModelError("config.json: MTP modules of several kinds are not supported", "see the end of layer_types")
    return keys.decoder(
        ropes[FULL] if FULL in ropes else ropes[SLIDING], layers[:count], mtp_layer=heads[0] if heads else None,
        mtp_recycle=keys.mtp_recycle(config, "pre_norm"), mtp_lm_heads=modules > 0,
    )  # fmt: skip


def _indexer(config: Reading, kv_heads: int) -> IndexerConfig | None:
    """The indexer of a full layer; None where the config has none."""
    sparse = config.get("sparse_config")
    if not isinstance(sparse, dict) or sparse.get("enabled") is False:
        return None
    keys.refuse_others(sparse, SPARSE_SERVED)
    heads, dim, rotary, top_k, size = (number(sparse, key, default=default) for key, default in SPARSE_SIZES.items())
    if heads % kv_heads or rotary > dim or rotary % 2 or size < max(kv_heads, 2):
        sizes = f"{heads} heads of {dim}, {rotary} rotated, and regions of {size} positions"
        known = f"known: a multiple of {kv_heads} heads, regions of {max(kv_heads, 2)} positions or more"
        raise ModelError(f"config.json: sparse_config has {sizes}", known)
    rope = rope_spec(config.inside({"partial_rotary_factor": rotary / dim}), dim)
    spec = IndexSpec(heads, dim, top_k, size, whole=True, local=True, groups=kv_heads)
    eps = real(config, "rms_norm_eps", 1e-6)
    return IndexerConfig(spec=spec, rope=rope, eps=eps, query_norm=True, pool_bias=False)


def _of_llama_cpp(config: Config) -> bool:
    return config.get("model_type") == LLAMA_CPP


def _kinds(config: Config, count: int) -> list[str]:
    """SLIDING or FULL for each layer and MTP module; all are full if the config has no key for kinds."""
    kinds, flags = config.get("layer_types"), config.get("sliding_window_pattern")
    kinds = config.get("layer_types_with_mtp") or kinds
    if kinds is None and flags is not None:  # a GGUF file's
        flags = flags if isinstance(flags, list) else [flags] * count
        kinds = [SLIDING if each else FULL for each in flags]
    kinds = [FULL] * count if kinds is None else kinds
    if isinstance(kinds, list):  # perhaps cut to the trunk, as transformers takes it, or of a model that was cut
        more = config.get("mtp_layer_types") or []
        kinds = [*kinds, *(more if len(kinds) < count else ()), *[FULL] * count][:count]
    keys.check_kinds(kinds, count, (FULL, SLIDING))
    return list(kinds)


def _sparse(config: Config, count: int) -> list[bool]:
    """For each layer and MTP module, whether it has experts: as listed, else all trunk layers but the first few."""
    trunk = keys.num_layers(config)
    if (kinds := config.get("mlp_layer_types")) is not None:
        more = config.get("mtp_mlp_layer_types") or []
        kinds = [*kinds, *more] if isinstance(kinds, list) and len(kinds) == trunk else kinds
        kinds = [*kinds, *[DENSE] * (count - len(kinds))] if isinstance(kinds, list) else kinds
        keys.check_kinds(kinds, count, (DENSE, SPARSE))
        return [kind == SPARSE for kind in kinds]
    listed, of_step5 = config.get("moe_layers_enum"), config.get("moe_layer_list")
    listed = of_step5 if listed is None else listed
    if listed is None:
        first = number(config, "first_k_dense_replace", default=FIRST_SPARSE, least=0)
        return [first <= i < trunk for i in range(count)]
    words = listed.split(",") if isinstance(listed, str) else listed
    if not isinstance(words, list) or not all(str(word).strip().isdecimal() for word in words):
        raise ModelError(f"config.json: moe_layers_enum is {listed!r}, but must name layers")
    named = {int(word) for word in words}
    return [i in named and i < trunk for i in range(count)]


def _limits(config: Config, key: str, count: int) -> list[Activation]:
    """Activation of each layer and MTP module, from the limits under `key`."""
    declared = config.get(key)
    values = declared if isinstance(declared, list) else [declared] * count  # a GGUF file's list of one number
    values = [*values, *[0.0] * (count - len(values))]
    if unknown := [value for value in values if value is not None and value not in [*LIMITS]]:
        known = ", ".join(f"{limit:g}" for limit in LIMITS)
        raise ModelError(f"config.json: {key} has {unknown[0]!r}, which is not supported", f"known: {known}")
    return [LIMITS[float(value or 0)] for value in values[:count]]


def _listed(config: Config, key: str, index: int) -> Any:
    """The value of layer `index` under a key that has a list for all layers or a single value."""
    value = config.get(key)
    if isinstance(value, list):
        if len(value) <= index:
            raise ModelError(f"config.json: {key} has {len(value)} entries, none for layer {index}")
        return value[index]
    return value


def _ropes(config: Reading, kinds: list[str]) -> dict[str, Reading]:
    """Kind of layer -> the config with its RoPE keys. RoPE scaling applies to full layers only."""
    if config.get("rope_parameters"):
        return keys.by_kind(config)
    gguf, scaling = _of_llama_cpp(config), config.get("rope_scaling")
    found = {}
    for kind in (FULL, SLIDING):
        index = kinds.index(kind) if kind in kinds else 0
        theta = config.get("rope_local_base_freq") if gguf and kind == SLIDING else None
        share = _listed(config, "partial_rotary_factors", index)
        if gguf:  # full layers rotate half of a head
            share = 0.5 if kind == FULL else 1.0
        rope = {
            "rope_theta": _listed(config, "rope_theta", index) if theta is None else theta,
            "partial_rotary_factor": share,
            "rope_scaling": _cut(scaling, number(config, "head_dim"), share) if kind == FULL else None,
        }
        found[kind] = config.inside(rope)
    return found


def _cut(scaling: Any, head_dim: int, share: float | None) -> Any:
    """The scaling with as many frequency divisors as are rotated; GGUF files pad them to a whole head."""
    if not isinstance(scaling, dict) or not isinstance(scaling.get("factors"), list):
        return scaling
    return {**scaling, "factors": scaling["factors"][: int(head_dim * (share or 1)) // 2]}


def _attention(config: Reading, kind: str, index: int) -> AttentionConfig:
    other = config.get("attention_other_setting") or {}
    if not isinstance(other, dict):
        raise ModelError(f"config.json: attention_other_setting is {other!r}, but must be an object")
    own: dict[str, Any] = {
        key: _listed(config, key, index) for key in ("num_attention_heads", "num_key_value_heads") if config.get(key)
    }
    groups = config.get("num_attention_groups")
    if groups:
        own["num_key_value_heads"] = groups
    if kind == SLIDING:
        heads = config.get("num_sliding_attention_heads", config.get("swa_num_attention_heads"))
        heads = heads or other.get("num_attention_heads")
        own |= {"num_attention_heads": heads} if heads else {}
        own |= {"num_key_value_heads": other["num_attention_groups"]} if other.get("num_attention_groups") else {}
    if other.get("head_dim", config.get("head_dim")) != config.get("head_dim"):
        raise ModelError(f"config.json: attention_other_setting has heads of {other['head_dim']}, others are as wide")
    mixer = keys.attention(
        config.inside(own), scale=number(config, "query_pre_attn_scalar", default=number(config, "head_dim")) ** -0.5,
        window=number(config, "sliding_window") if kind == SLIDING else 0, **keys.biases(config), qk_norm=True,
        gated=True, gate_per_head=True,
    )  # fmt: skip
    return replace(mixer, indexer=_indexer(config, mixer.spec.num_kv_heads) if kind == FULL else None)


def _layer(config: Config, mixer: AttentionConfig, sparse: bool, routed: Activation, shared: Activation) -> LayerConfig:
    if not sparse:
        return keys.layer(config, mixer, replace(keys.mlp(config), activation=shared))
    router = RouterSpec(
        num_experts=number(config, "moe_num_experts", "n_routed_experts", "num_experts", needs="a mixture of experts"),
        top_k=number(config, "moe_top_k", "num_experts_per_tok", needs="a mixture of experts"),
        scoring="sigmoid",
        normalize=flag(config, "norm_topk_prob", True),
        scale=real(config, "routed_scaling_factor" if _of_llama_cpp(config) else "moe_router_scaling_factor", 1.0),
    )
    width = number(config, "share_expert_dim", "shared_expert_intermediate_size", needs="a mixture of experts")
    experts = keys.experts(config, router, shared=width, bias=True, activation=routed, shared_activation=shared)
    return keys.layer(config, mixer, experts)


RMS_NORM = re.compile(r"(?<!\.indexer\.k_)norm(_hidden|_embedding)?\.weight$")
OWN_HEAD = re.compile(r"layers\.(\d+)\.shared_head\.head\.weight")


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: keeps the MTP modules' own LM heads."""
    ours = {}
    for name, tensor in tensors.items():
        if match := OWN_HEAD.fullmatch(name):
            name = f"mtp.{int(match[1]) - config.num_layers}.lm_head.weight"
        ours[name] = tensor
    return ours


def restore(arrays: Arrays, config: DecoderConfig) -> Arrays:
    """Family.restore: inverse of `adapt`; also stacks experts."""
    theirs: Arrays = {}
    others, experts = grouped_experts(arrays)
    for name, array in others.items():
        if match := re.fullmatch(r"mtp\.(\d+)\.lm_head\.weight", name):
            name = f"layers.{config.num_layers + int(match[1])}.shared_head.head.weight"
        theirs[name] = array
    stacks = ((f"{prefix}.{part}", each) for prefix, parts in experts.items() for part, each in parts.items())
    return theirs | {name: np.stack(each) for name, each in stacks}


INDEXER = {
    "q.": "wq_b.",
    "k.": "wk.",
    "w.": "weights_proj.",
    "z.weight": "pool_gate",
    "q_norm.": "q_norm.",
    "k_norm.": "k_norm.",
}
"""Parts of names of Step-5's indexers after `sparse_indexer_`."""
FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 128000, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    },
    harmless={
        **dict.fromkeys(("num_key_value_heads", "num_attention_groups", "num_sliding_attention_heads",
                         "attention_other_setting", "per_layer_config"), "heads of kinds of layers"),
        **dict.fromkeys(("rope_theta", "partial_rotary_factors", "rope_local_base_freq", "use_rope_layers",
                         "yarn_only_types"), "ropes of kinds of layers"),
        **dict.fromkeys(("sliding_window", "intermediate_size"), "of such layers, where there are any"),
        **dict.fromkeys(
            ("moe_num_experts", "n_routed_experts", "num_experts", "num_local_experts", "moe_top_k",
             "num_experts_per_tok", "moe_intermediate_size", "share_expert_dim", "share_expert_dims",
             "shared_expert_intermediate_size", "moe_router_scaling_factor", "routed_scaling_factor",
             "norm_topk_prob", "expert_gating_func"),
            "used only by experts",
        ),
        **dict.fromkeys(("need_fp32_gate", "use_qk_norm", "max_seq_len", "true_head_dim", "gating"), "always so here"),
        **dict.fromkeys(("norm_dtype", "fp32_residual_connection"), "of vLLM's precision"),
        **dict.fromkeys(("projector_bias", "understand_projector_stride", "use_im_start_end",
                         "vision_select_layer", "image_token_len", "patch_token_len", "im_start_token",
                         "im_end_token", "im_patch_token"), "of images"),
    },
    names=Names(
        {
            **WRAPPED,
            "vit_large_projector.": None,
            "model.layers.{i}.self_attn.ssmax_s": None,
        },
        parts={
            ".moe.router_bias": ".mlp.gate.e_score_correction_bias", ".moe.gate.": ".mlp.gate.",
            ".moe.": ".mlp.experts.", ".share_expert.": ".mlp.shared_experts.",
            ".self_attn.g_proj.": ".self_attn.gate_proj.",
            **{f".sparse_indexer_{theirs}": f".indexer.{ours}" for theirs, ours in INDEXER.items()},
            ".transformer.shared_head.norm.": ".shared_head.norm.",
            ".transformer.shared_head.output.": ".shared_head.head.",
        },
        gguf=GGUF_GATE,
    ),
    shifted_norms=RMS_NORM,
    adapt=adapt,
    restore=restore,
    head=HeadSpec(tap="pre_norm", recycle="pre_norm", beyond="cycle"),
    mtp=MTPLayout(
        title="Step-3.5, 3.7, 5",
        own=("lm_head",),
        per_layer=("layer_types", "rope_theta", "partial_rotary_factors", "use_rope_layers"),
        llama_cpp=(LLAMA_CPP,),
    ),
    aliases=("step3p7", "step5", "step5_vl", LLAMA_CPP),
    small={
        "model_type": "step3p5", "architectures": ["Step3p5ForCausalLM"], "num_attention_groups": 2,
        "num_key_value_heads": None, "num_attention_heads": 4, "sliding_window": 9, "moe_num_experts": 7,
        "moe_top_k": 3,
        "moe_intermediate_size": 24, "share_expert_dim": 20, "moe_router_scaling_factor": 1.5, "moe_layers_enum": "1,2",
        "num_nextn_predict_layers": 3, "rope_theta": [5e4, 300.0, 300.0, 300.0, 300.0, 300.0],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 1.0, 1.0], "swiglu_limits": [0.0, 7, 0.0],
        "layer_types": [FULL, *[SLIDING] * 5], "attention_other_setting": {"num_attention_heads": 6},
    },
    scratch={
        **SCRATCH_EXPERTS, "moe_num_experts": 8, "moe_top_k": 2, "share_expert_dim": 64, "num_attention_groups": 2,
        "num_nextn_predict_layers": 0,  # with LM heads of their own
    },
)  # fmt: skip
