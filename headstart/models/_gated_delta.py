"""Common part of Qwen3-Next and Qwen3.5: Gated DeltaNet and gated attention layers, (1 + w) norms, MTP under `mtp.`.

Formulas: transformers 5.23, `modeling_qwen3_next.py` and `modeling_qwen3_5.py`; the MTP module: vLLM 0.32,
`qwen3_next_mtp.py`. Names and values in GGUF files: llama.cpp's `conversion/qwen.py`.
"""

import math
import re
from collections.abc import Mapping, Sequence as Seq
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.rows import RowSubset
from headstart.heads.base import HeadSpec
from headstart.kernels.ops import RawTensor
from headstart.kernels.specs import DeltaSpec
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.delta import DeltaConfig
from headstart.layers.parts import FeedForwardConfig
from headstart.models import _qwen_vision, keys
from headstart.models.base import Family
from headstart.models.keys import FULL, LINEAR, Config, flag, number
from headstart.models.mtp import LLAMA_CPP_KEYS, LlamaCppDraft, MTPLayout, XllmDraft
from headstart.models.names import ALL_NORMS, DECAY, OWN_MODULE, PREFIXES, Names
from headstart.models.small import SCRATCH_EXPERTS, Arrays

MAX_FEATURES = 1 << 14
NAMES = Names(
    {**PREFIXES, "visual.": None, **OWN_MODULE},
    parts={".mlp.shared_expert.": ".mlp.shared_experts.", **DECAY},
    gguf={
        "blk.{i}.ssm_a": "layers.{i}.linear_attn.decay_rate",
        "blk.{i}.ssm_dt.bias": "layers.{i}.linear_attn.decay_bias",
        "blk.{i}.ssm_conv1d.weight": "layers.{i}.linear_attn.conv1d.weight",
        "blk.{i}.ssm_ba.weight": "layers.{i}.linear_attn.in_proj_ba.weight",
        ".self_attn.qkv_proj.": ".linear_attn.in_proj_qkv.",
    },
)
SHARED = ("projection", "norm_embedding", "norm_hidden", "norm")
GGUF_SHARED = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
"""Tensors that all MTP modules share: canonical names, and those of GGUF files, which only the first module has."""


def parse(config: Config, *, tiled: bool = False) -> DecoderConfig:
    """Family.parse. tiled: the value heads are in llama.cpp's order (DeltaSpec.tiled)."""
    config = keys.text_config(config)
    if config.get("mtp_use_dedicated_embeddings"):
        raise ModelError("config.json: mtp_use_dedicated_embeddings (an embedding of the MTP module) is not supported")
    if config.get("output_gate_type") not in (None, "swish", "silu"):
        raise ModelError(f"config.json: output_gate_type is {config['output_gate_type']!r}", "known: swish")
    attention = gated_attention(config)
    mixers = [delta(config, tiled) if kind == LINEAR else attention for kind in layer_types(config)]
    return keys.decoder(
        config,
        [keys.layer(config, mixer, _feed_forward(config, i)) for i, mixer in enumerate(mixers)],
        mtp_layer=keys.layer(config, attention, _feed_forward(config)),
    )


def _feed_forward(config: Config, index: int | None = None) -> FeedForwardConfig:
    """The feed-forward part of layer `index`, or (None) of an MTP module."""
    if not config.get("num_experts") or (index is not None and not keys.has_experts(config, index)):
        return keys.mlp(config)
    shared = number(config, "shared_expert_intermediate_size", default=0, least=0)
    return keys.softmax_experts(config, shared=shared)


def gated_attention(config: Config) -> AttentionConfig:
    """The attention of a full layer."""
    return keys.attention(config, **keys.biases(config), qk_norm=True, gated=flag(config, "attn_output_gate", True))


def delta(config: Config, tiled: bool = False) -> DeltaConfig:
    """Gated DeltaNet of a config."""

    def size(*names: str) -> int:
        return number(config, *names, least=0, needs="linear attention")

    heads, key_heads = size("linear_num_value_heads"), size("linear_num_key_heads")
    key_dim = size("linear_key_head_dim")
    width = size("linear_conv_kernel_dim")
    inner = number(config, "linear_inner_size", default=0, least=0)  # a GGUF file's
    value_dim = inner // max(heads, 1) or size("linear_value_head_dim")
    sizes = (key_heads, heads, key_dim, value_dim, width)
    if min(sizes) < 1 or max(sizes) > MAX_FEATURES or width < 2 or heads % key_heads:
        raise ModelError(
            f"config.json: linear attention has {heads} value heads of {value_dim}, {key_heads} key heads of {key_dim} "
            f"and a convolution of {width}",
            "value heads must be a multiple of key heads, a convolution at least 2 wide, all sizes positive",
        )
    return DeltaConfig(DeltaSpec(key_heads, heads, key_dim, value_dim, tiled), width, keys.activation(config))


def layer_types(config: Config) -> list[str]:
    """LINEAR or FULL for each layer."""
    kinds, num_layers = config.get("layer_types"), keys.num_layers(config)
    if kinds is None and (recurrent := config.get("recurrent_layers")) is not None:  # a GGUF file's
        flags = recurrent if isinstance(recurrent, list) else [recurrent] * num_layers
        kinds = [LINEAR if flag else FULL for flag in flags[:num_layers]]
    if kinds is None:
        every = number(config, "full_attention_interval", default=4)
        kinds = [FULL if (i + 1) % every == 0 else LINEAR for i in range(num_layers)]
    keys.check_kinds(kinds, num_layers, (LINEAR, FULL))
    return list(kinds)


# Files' tensors -> canonical tensors.


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: splits fused projections, and gives each MTP module the shared tensors."""
    ours = _linear_tensors(tensors, config.mixers(DeltaConfig))
    mixer = _attention(config)
    if mixer.gated:
        for name in [name for name in ours if ".self_attn.q_proj." in name]:
            ours |= _query_and_gate(name, ours[name], mixer)
    for i in range(1, config.num_mtp):
        own, first, module = "block.", "mtp.0.", f"mtp.{i}."
        if from_gguf:  # the layers after the trunk's
            own, first, module = "", f"layers.{config.num_layers}.", f"layers.{config.num_layers + i}."
        if f"{module}{own}input_layernorm.weight" in ours:
            shared = {part: ours.get(f"{first}{part}.weight") for part in (GGUF_SHARED if from_gguf else SHARED)}
            ours |= {f"{module}{part}.weight": tensor for part, tensor in shared.items() if tensor is not None}
    return ours


def _attention(config: DecoderConfig) -> AttentionConfig:
    """The attention of full layers and MTP modules."""
    assert config.mtp_layer and isinstance(config.mtp_layer.mixer, AttentionConfig)
    return config.mtp_layer.mixer


def _linear_tensors(tensors: dict[str, RawTensor], linear: Mapping[str, DeltaConfig]) -> dict[str, RawTensor]:
    """Tensors with those of linear layers in canonical form. linear: `layers.i` -> a linear layer."""
    ours: dict[str, RawTensor] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.partition(".linear_attn.")
        if part in JOINED and stem in linear:
            ours |= _split(tensor, f"{stem}.linear_attn", JOINED[part](linear[stem]))
        elif part == "conv1d.weight":
            ours[f"{stem}.linear_attn.conv"] = _taps(tensor)
        else:
            ours[name] = tensor
    return ours


def _query_and_gate(name: str, tensor: RawTensor, mixer: AttentionConfig) -> dict[str, RawTensor]:
    """Splits q_proj, whose rows are [query, gate] for each head, into q_proj and gate_proj."""
    spec = mixer.spec
    if tensor.shape[0] != 2 * spec.num_heads * spec.head_dim:
        return {name: tensor, name.replace("q_proj", "gate_proj"): tensor}  # the loader reports the wrong shape
    rows = np.arange(tensor.shape[0], dtype=np.int64).reshape(spec.num_heads, 2, -1)
    parts = (RowSubset(tensor, rows[:, part].reshape(-1)) for part in (0, 1))
    return dict(zip((name, name.replace("q_proj", "gate_proj")), parts, strict=True))


def _taps(tensor: RawTensor) -> RawTensor:
    """Convolution weights [channels, (1,) width] -> [width * channels], all channels of a tap together."""
    channels, size = tensor.shape[0], math.prod(tensor.shape)
    return tensor.shaped(channels, size // max(channels, 1)).transposed().shaped(size)


def _split(tensor: RawTensor, prefix: str, rows: dict[str, NDArray[np.int64]]) -> dict[str, RawTensor]:
    if sum(each.size for each in rows.values()) != tensor.shape[0]:
        return {tensor.name: tensor}  # the loader then misses the parts by name
    return {f"{prefix}.in_proj_{part}.weight": RowSubset(tensor, each) for part, each in rows.items()}


def _by_key_head(spec: DeltaSpec, sizes: Seq[int]) -> list[NDArray[np.int64]]:
    """Row indices of each part of a fused matrix, whose rows for each key head are those of all parts in turn. sizes:
    rows of each part per key head."""
    ends = np.cumsum([0, *sizes])
    rows = np.arange(spec.num_key_heads * ends[-1], dtype=np.int64).reshape(spec.num_key_heads, -1)
    return [rows[:, first:last].reshape(-1) for first, last in pairwise(ends)]


def _qkvz_rows(config: DeltaConfig) -> dict[str, NDArray[np.int64]]:
    spec = config.delta
    values = spec.num_heads // spec.num_key_heads * spec.value_dim
    q, k, v, z = _by_key_head(spec, (spec.key_dim, spec.key_dim, values, values))
    return {"qkv": np.concatenate((q, k, v)), "z": z}


def _ba_rows(config: DeltaConfig) -> dict[str, NDArray[np.int64]]:
    values = config.delta.num_heads // config.delta.num_key_heads
    b, a = _by_key_head(config.delta, (values, values))
    return {"b": b, "a": a}


JOINED = {"in_proj_qkvz.weight": _qkvz_rows, "in_proj_ba.weight": _ba_rows}
"""Name of a fused tensor -> function that returns the rows of each projection in it."""
SHIFTED_NORMS = re.compile(rf"^(?!.*\.linear_attn\.).*{ALL_NORMS.pattern}")
"""Norms outside linear layers."""


# Canonical tensors -> Hugging Face's.


def restore(arrays: Arrays, config: DecoderConfig, *, joined: bool) -> Arrays:
    """Family.restore. joined: the projections of a linear layer are fused into two tensors (JOINED)."""
    theirs: Arrays = {}
    for name, array in arrays.items():
        stem, _, part = name.partition(".linear_attn.")
        if part == "conv":
            width = config.mixers(DeltaConfig)[stem].conv_width
            theirs[f"{stem}.linear_attn.conv1d.weight"] = array.reshape(width, -1).T[:, None].copy()
        else:
            theirs[name] = array
    for name in [name for name in theirs if ".self_attn.gate_proj." in name]:
        query = name.replace("gate_proj", "q_proj")
        heads, rest = _attention(config).spec.num_heads, theirs[query].shape[1:]
        parts = [each.reshape(heads, -1, *rest) for each in (theirs[query], theirs.pop(name))]
        theirs[query] = np.concatenate(parts, axis=1).reshape(-1, *rest)
    for stem, delta in config.mixers(DeltaConfig).items() if joined else ():
        for name, rows in JOINED.items():
            written = {part: f"{stem}.linear_attn.in_proj_{part}.weight" for part in rows(delta)}
            if not all(each in theirs for each in written.values()):  # of an MTP module's arrays alone
                continue
            apart = {part: theirs.pop(each) for part, each in written.items()}
            together = np.empty((sum(map(len, apart.values())), config.hidden_size), np.float32)
            for part, indices in rows(delta).items():
                together[indices] = apart[part]
            theirs[f"{stem}.linear_attn.{name}"] = together
    return theirs


DEFAULTS = {
    "max_position_embeddings": 32768, "mrope_interleaved": True,
    "head_dim": 256, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
HARMLESS = {
    "mamba_ssm_dtype": "states are float32 here",
    "full_attention_interval": "given by layer_types",
    "sliding_window": "used only with use_sliding_window, which is refused",
    "max_window_layers": "used only with use_sliding_window, which is refused",
    **dict.fromkeys((*DEFAULTS, "linear_inner_size"), "used only if there are linear or full layers"),
    "intermediate_size": "used only by dense layers",
}
WITHOUT_EXPERTS = dict.fromkeys(
    ("moe_intermediate_size", "shared_expert_intermediate_size", "num_experts_per_tok", "norm_topk_prob"),
    "used only by experts",
)

# Small models.

SMALL = {
    "head_dim": 16, "partial_rotary_factor": 0.5, "full_attention_interval": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
"""Config keys of a test model: linear and full layers alternate, with three value heads for each key head."""
SMALL_EXPERTS = {
    "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip
SCRATCH = {
    "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}  # fmt: skip
SCRATCH_WITH_EXPERTS = {**SCRATCH, **SCRATCH_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 64}


LINEAR_KEYS = (
    "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "full_attention_interval",
    "expert_shared_feed_forward_length",
)  # fmt: skip
"""Metadata keys of GGUF files for linear layers, without the architecture before them."""
NEWER: dict[str, Any] = {
    "count_key": "mtp_num_hidden_layers",
    "xllm": XllmDraft(
        architecture="Qwen3_5MtpForCausalLM",
        variants={"num_experts": "qwen3_5_moe", "n_routed_experts": "qwen3_5_moe"},
        several=True,
        shared=True,
        config={"mtp_num_hidden_layers": "count"},
        nested_config={
            "num_hidden_layers": "count", "mtp_num_hidden_layers": "count", "layer_types": ["full_attention"],
        },
    ),
}  # fmt: skip
"""MTPLayout fields that Qwen3.5 and later families share."""


def llama_cpp_draft(architecture: str) -> LlamaCppDraft:
    """LlamaCppDraft of Qwen3.5 and later families."""
    names = LLAMA_CPP_KEYS + LINEAR_KEYS
    return LlamaCppDraft(
        architecture=architecture, pre_tokenizer="qwen35", keys=names, norm_shift=1.0, rotary=0.25, recurrent=True
    )


def family(
    *, mtp: MTPLayout, aliases: tuple[str, ...], small: Mapping[str, Any], defaults: Mapping[str, Any],
    joined: bool = False, tiled: str = "", experts: bool = False,
) -> Family:  # fmt: skip
    """A Family over this file's functions. tiled: llama.cpp's architecture, if its files have the value heads in
    another order. joined: see `restore`. experts: layers may have experts."""
    return Family(
        parse=lambda config: parse(config, tiled=bool(tiled) and config.get("model_type") == tiled),
        defaults={**DEFAULTS, **defaults}, harmless={**HARMLESS, **({} if experts else WITHOUT_EXPERTS)}, names=NAMES,
        shifted_norms=SHIFTED_NORMS, head=HeadSpec(beyond="cycle"), mtp=mtp,
        adapt=adapt, restore=partial(restore, joined=joined), aliases=aliases,
        vision=_qwen_vision.VISION if not joined else None,
        small={**SMALL, **(SMALL_EXPERTS if experts else {}), **small},
        scratch=SCRATCH_WITH_EXPERTS if experts else SCRATCH,
    )  # fmt: skip
