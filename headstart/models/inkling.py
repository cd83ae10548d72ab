"""Inkling, text part: biases by distance in place of rotary positions, windows in five of six layers, short
convolutions in every layer, and shared experts that the router weighs.

Formula: transformers 5.24 `models/inkling`. Tensor names are those of released files. From `log_scaling_n_floor` on
queries grow with the logarithm of positions; contexts end there. MTP: vLLM 0.33 `models/inkling/nvidia/mtp.py`, with
several modules `v1/worker/gpu/spec_decode/multi_module_mtp`: a chain, whose norm all modules share.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from headstart.errors import ModelError
from headstart.formats.base import make_tensor
from headstart.heads.base import HeadSpec
from headstart.kernels.ops import AttentionSpec, RawTensor, RouterSpec
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.moe import MoEConfig
from headstart.layers.parts import FeedForwardConfig
from headstart.layers.relative import ConvolvedLayerConfig, RelativeConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.joined import alternating, grouped_experts
from headstart.models.keys import Config, number, real
from headstart.models.mtp import MTPLayout
from headstart.models.names import Names
from headstart.models.small import Arrays

LLAMA_CPP = "inkling"
FULL, SLIDING = "hybrid", "hybrid_sliding"
SERVED = {
    "gate_activation": "sigmoid", "final_logit_softcapping": None, "inference_moe_w13_interleaved": True,
    "shared_experts_size": 1,
    **dict.fromkeys(("q_bias", "o_bias"), False),
    **dict.fromkeys(
        ("use_embed_norm", "use_sconv", "use_gate_bias", "use_global_scale", "norm_after_topk", "shared_expert_sink"),
        True,
    ),
}  # fmt: skip
ALWAYS = 1e6  # bias of shared experts in the choice of experts
PARTS: Mapping[str, str] = {
    ".attn.wq_du.": ".self_attn.q_proj.", ".attn.wk_dv.": ".self_attn.k_proj.", ".attn.wv_dv.": ".self_attn.v_proj.",
    ".attn.wr_du.": ".self_attn.r_proj.", ".attn.wo_ud.": ".self_attn.o_proj.", ".attn.": ".self_attn.",
    ".attn_norm.": ".input_layernorm.", ".mlp_norm.": ".post_attention_layernorm.",
    ".mlp.gate.bias": ".mlp.gate.e_score_correction_bias", ".mlp.w2_md.": ".mlp.down_proj.",
}  # fmt: skip


def parse(config: Config) -> DecoderConfig:
    if config.get("model_type") == LLAMA_CPP:
        hint = "use the model's safetensors; other engines run the file: headstart launch llamacpp FILE.gguf"
        raise ModelError(f"GGUF files of {LLAMA_CPP} models are not read", hint)
    config = keys.text_config(config)
    keys.refuse_others(config, SERVED)
    dense = MLPConfig(inner=number(config, "dense_intermediate_size", "intermediate_size"))
    sparse = _experts(config)
    layers: list[LayerConfig] = []
    for kind, feed in zip(_kinds(config), keys.feed_kinds(config, "dense_mlp_idx"), strict=True):
        part: FeedForwardConfig = dense if feed == keys.DENSE else sparse
        layers.append(
            ConvolvedLayerConfig(mixer=_mixer(config, kind), mlp=part, eps=real(config, "rms_norm_eps", 1e-6))
        )
    modules = _modules(config, dense)
    longest = number(config, "max_position_embeddings", "model_max_length", default=131072)
    return keys.decoder(
        config, layers, vocab_size=number(config, "unpadded_vocab_size", "vocab_size"), embedding_norm="weighted",
        logit_scale=1 / real(config, "logits_mup_width_multiplier", 24.0),
        mtp_layer=modules[0], mtp_layers=modules, mtp_output_norm=bool(_mtp(config).get("chain_hidden_post_norm")),
        max_length=min(longest, number(config, "log_scaling_n_floor", default=longest)),
    )  # fmt: skip


def _mtp(config: Config) -> Mapping[str, Any]:
    """Settings of the MTP modules."""
    declared = config.get("mtp_config") or {}
    if not isinstance(declared, dict):
        raise ModelError(f"config.json: mtp_config is {declared!r}, no object")
    return declared


def _modules(config: Config, dense: MLPConfig) -> tuple[LayerConfig, ...]:
    """The blocks of the MTP modules; without modules that of heads that are trained on the model."""
    if not (count := keys.num_mtp(config)):
        return (keys.layer(config, keys.attention(config), dense),)
    local, eps = _mtp(config).get("local_layer_ids") or (), real(config, "rms_norm_eps", 1e-6)
    mixers = [_mixer(config, SLIDING if i in local else FULL) for i in range(count)]
    return tuple(ConvolvedLayerConfig(mixer=mixer, mlp=dense, eps=eps) for mixer in mixers)


def _mixer(config: Config, kind: str) -> RelativeConfig:
    heads, kv_heads, dim = (
        number(config, *([f"swa_{name}"] if kind == SLIDING else []), name)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if heads % kv_heads:
        raise ModelError(f"config.json: {heads} query heads are no multiple of {kv_heads} kv heads")
    window = number(config, "sliding_window_size") if kind == SLIDING else 0
    return RelativeConfig(
        spec=AttentionSpec(heads, kv_heads, dim, 1 / dim, window=window), features=number(config, "d_rel"),
        extent=window or number(config, "rel_extent"), hidden=number(config, "hidden_size"),
        conv_width=number(config, "sconv_kernel_size", "conv_kernel_size"),
    )  # fmt: skip


def _kinds(config: Config) -> list[str]:
    count, kinds = keys.num_layers(config), config.get("layer_types")
    if kinds is None:
        local = config.get("local_layer_ids")
        listed = [i for i in range(count) if (i + 1) % 6] if local is None else local
        if not isinstance(listed, list):
            raise ModelError(f"config.json: local_layer_ids is {listed!r}, no list")
        kinds = [SLIDING if i in listed else FULL for i in range(count)]
    keys.check_kinds(kinds, count, (FULL, SLIDING))
    return list(kinds)


def _experts(config: Config) -> MoEConfig:
    """Shared experts are routed ones that are always chosen."""
    count, shared = number(config, "n_routed_experts"), number(config, "n_shared_experts", least=0)
    top_k = number(config, "num_experts_per_tok")
    if top_k > count:
        raise ModelError(f"config.json: a token cannot take {top_k} of {count} experts")
    router = RouterSpec(count + shared, top_k + shared, scoring="sigmoid", scale=real(config, "route_scale", 8.0))
    names = () if config.get("dense_intermediate_size") else ("moe_intermediate_size",)
    inner = number(config, *names, "intermediate_size")
    return MoEConfig(router=router, inner=inner, bias=True, always=shared)


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: parts interleaved gates and stacks, puts shared experts after the routed ones, and multiplies the
    last matrices by the global scales."""
    ours: dict[str, RawTensor] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".mlp.")
        scale = _scale(tensors, f"{stem}.mlp.gate.global_scale", f"{stem}.mlp.global_scale")
        if name.endswith("global_scale"):
            continue
        if name in ("embed_tokens.weight", "lm_head.weight") and tensor.shape[0] > config.vocab_size:
            ours[name] = tensor.take_rows(np.arange(config.vocab_size))
        elif part == "gate.e_score_correction_bias":
            stack = tensors.get(f"{stem}.mlp.shared_experts.shared_w2_weight")
            shared = stack.shape[0] if stack else 0
            values = np.concatenate((tensor.float32().reshape(-1), np.full(shared, ALWAYS, np.float32)))
            ours[name] = make_tensor(name, values.shape, "F32", values.view(np.uint8))
        elif part == "w13_dn.weight":
            ours |= _deinterleave(f"{stem}.mlp", tensor)
        elif part == "down_proj.weight":
            ours[name] = tensor if scale == 1 else tensor.affine(scale, 0)
        elif match := re.fullmatch(r"(shared_)?experts\.(?:shared_)?(w13|w2)_weight", part):
            routed = tensors.get(f"{stem}.mlp.experts.{match[2]}_weight")
            first = routed.shape[0] if match[1] and routed else 0
            ours |= _unstacked(f"{stem}.mlp.experts", tensor, first, match[2] == "w13", scale)
        else:
            ours[name] = tensor
    if (norm := ours.get("mtp.0.norm.weight")) is not None:
        ours |= {f"mtp.{i}.norm.weight": norm for i in range(1, config.num_mtp)}
    return ours


def _unstacked(at: str, stack: RawTensor, first: int, both: bool, scale: float) -> dict[str, RawTensor]:
    """The matrices of experts `first` and on; both: gates and up."""
    ours: dict[str, RawTensor] = {}
    for i in range(stack.shape[0]):
        item = stack.part(i)
        if both:
            ours |= _deinterleave(f"{at}.{first + i}", item)
        else:
            ours[f"{at}.{first + i}.down_proj.weight"] = item if scale == 1 else item.affine(scale, 0)
    return ours


def _scale(tensors: Mapping[str, RawTensor], *names: str) -> float:
    found = next((tensors[name] for name in names if name in tensors), None)
    return 1.0 if found is None else float(found.float32().reshape(-1)[0])


def _deinterleave(at: str, both: RawTensor) -> dict[str, RawTensor]:
    """Rows of gate and up by turns -> two matrices."""
    rows = np.arange(0, both.shape[0], 2)
    return {f"{at}.gate_proj.weight": both.take_rows(rows), f"{at}.up_proj.weight": both.take_rows(rows + 1)}


def restore(arrays: Arrays, config: DecoderConfig) -> Arrays:
    """Family.restore: inverse of `adapt`, with global scales of 1."""
    theirs: Arrays = {}
    others, experts = grouped_experts(arrays)
    for name, array in others.items():
        if match := re.fullmatch(r"(.+\.mlp)\.(gate|up)_proj\.weight", name):
            if match[2] == "gate":
                theirs[f"{match[1]}.w13_dn.weight"] = alternating(array, arrays[f"{match[1]}.up_proj.weight"])
                theirs[f"{match[1]}.global_scale"] = np.ones(1, np.float32)
        elif name.endswith(".e_score_correction_bias"):
            theirs[name] = array[: _num_routed(config, name)]
            theirs[name.replace("e_score_correction_bias", "global_scale")] = np.ones(1, np.float32)
        else:
            theirs[name] = array
    for prefix, parts in experts.items():
        gates, ups, downs = (parts[f"{part}_proj.weight"] for part in ("gate", "up", "down"))
        both, routed = list(map(alternating, gates, ups)), _num_routed(config, prefix)
        shared = prefix.replace(".experts", ".shared_experts.shared_")
        for stem, which in ((f"{prefix}.", slice(routed)), (shared, slice(routed, None))):
            theirs[f"{stem}w13_weight"] = np.stack(both[which])
            theirs[f"{stem}w2_weight"] = np.stack(downs[which])
    return theirs


def _num_routed(config: DecoderConfig, name: str) -> int:
    """Experts of a tensor's layer without the shared ones."""
    mlp = config.layers[int(name.split(".")[1])].mlp
    assert isinstance(mlp, MoEConfig)
    return mlp.router.num_experts - mlp.always


SMALL: dict[str, Any] = {
    "num_hidden_layers": 4, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 8,
    "sliding_window_size": 11, "d_rel": 5, "rel_extent": 21, "local_layer_ids": [0, 1, 3], "sconv_kernel_size": 4,
    "dense_mlp_idx": 1, "dense_intermediate_size": 80, "intermediate_size": 24, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_shared_experts": 2, "route_scale": 2.0, "logits_mup_width_multiplier": 0.5,
    "log_scaling_n_floor": 128000, "rope_theta": None,
    "mtp_config": {"num_nextn_predict_layers": 1, "local_layer_ids": [0], "chain_hidden_post_norm": False},
}  # fmt: skip
FAMILY = Family(
    parse=parse,
    defaults={
        "rms_norm_eps": 1e-6, "conv_kernel_size": 4, "n_shared_experts": 0, "dense_mlp_idx": 0, "d_rel": 16,
        "rel_extent": 1024, "sliding_window_size": 512,
    },
    harmless={
        **dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters"), "positions are not rotated"),
        **dict.fromkeys(("v_head_dim", "swa_v_head_dim"), "that of keys"),
        **dict.fromkeys(
            ("num_attention_heads", "num_key_value_heads", "head_dim", "rel_extent"), "of layers without a window"
        ),
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim"), "of layers with one"),
        "chain_hidden_post_norm": "given by mtp_config",
        **dict.fromkeys(("log_scaling_alpha", "padded_vocab_size", "rms_norm_eps_moe_gate"), "of what is not reached"),
        **dict.fromkeys(("hidden_act", "dense_intermediate_size", "moe_intermediate_size"), "read where needed"),
    },
    names=Names(
        {
            "model.llm.": "", "model.llm.embed.": "embed_tokens.", "model.llm.unembed.": "lm_head.",
            "model.mtp.layers.{i}.hidden_norm.": "mtp.{i}.norm_hidden.",
            "model.mtp.layers.{i}.embed_norm.": "mtp.{i}.norm_embedding.",
            "model.mtp.layers.{i}.input_proj.": "mtp.{i}.projection.",
            "model.mtp.layers.{i}.transformer_block.": "mtp.{i}.block.",
            "model.mtp.chain_norm.": "mtp.{i}.norm.",
            **dict.fromkeys(("audio.", "visual.")),
        },
        parts=PARTS,
    ),
    adapt=adapt,
    restore=restore,
    head=HeadSpec(hidden_first=True, embed_norm=True, chained=True),
    mtp=MTPLayout(
        title="Inkling", count_key="mtp_config.num_nextn_predict_layers",
        not_xllm="xLLM has no draft of this type", not_llama_cpp="its converter leaves the modules out",
    ),
    aliases=("inkling_model", "inkling_mm_model", "inkling_text"),
    small={"model_type": "inkling_model", "architectures": ["InklingForConditionalGeneration"], **SMALL},
)  # fmt: skip
