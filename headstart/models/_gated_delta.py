"""What Qwen3-Next and Qwen3.5 share: Gated DeltaNet beside gated attention, (1 + w) norms, MTP under `mtp.`.

Formulas: transformers 5.23, `modeling_qwen3_next.py` and `modeling_qwen3_5.py`; the MTP module: vLLM 0.32,
`qwen3_next_mtp.py`. Names in GGUF files and what is folded into them: llama.cpp's `conversion/qwen.py`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.rows import Picked
from headstart.kernels.ops import DeltaSpec, RawTensor, RouterSpec
from headstart.layers.build import DecoderConfig
from headstart.layers.delta import DeltaConfig
from headstart.layers.moe import MoEConfig
from headstart.layers.mtp import HeadSpec
from headstart.models._family import (
    SCRATCH_EXPERTS,
    Arrays,
    Config,
    block_shapes,
    parse_decoder,
    random_arrays,
    tiny_config,
    without_prefix,
)

HEAD = HeadSpec(beyond="cycle")
LINEAR, FULL = "linear_attention", "full_attention"
MTP_NAMES = {
    "fc": "projection",
    "pre_fc_norm_embedding": "norm_embedding",
    "pre_fc_norm_hidden": "norm_hidden",
    "norm": "norm",
}
WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "model.")


def text_config(config: Config) -> dict[str, Any]:
    """The language model's part of a multimodal wrapper's config, or a text model's own."""
    inner = config.get("text_config")
    if inner is None:
        return dict(config)
    if not isinstance(inner, dict):
        raise ModelError("config.json: text_config is not an object")
    ties = {"tie_word_embeddings": bool(config.get("tie_word_embeddings") or inner.get("tie_word_embeddings"))}
    return {**config, **inner, **ties}


def parse(config: Config, *, tiled: bool = False) -> DecoderConfig:
    """`tiled`: the value heads are in llama.cpp's order."""
    config = text_config(config)
    _refuse_unknown(config)
    experts = _experts(config)
    defaults = {
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "intermediate_size": config.get("moe_intermediate_size"),
    }
    sizes = parse_decoder(
        {**defaults, **config},
        qk_norm=True,
        moe=experts,
        qkv_bias=bool(config.get("attention_bias", False)),
        o_bias=bool(config.get("attention_bias", False)),
        gated_attention=bool(config.get("attn_output_gate", True)),
        num_mtp=_num_mtp(config),
    )
    return replace(sizes, delta=_delta(config, sizes.num_layers, tiled))


def _num_mtp(config: Config) -> int:
    """Where a config does not tell, as Qwen3-Next's: one, if the checkpoint holds it."""
    told = (config.get(key) for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"))
    try:
        return int(next((number for number in told if number is not None), 1))
    except (TypeError, ValueError):
        raise ModelError("config.json: the number of MTP layers is not a number") from None


def _refuse_unknown(config: Config) -> None:
    """Features that nobody has implemented here, by name."""
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"config.json: hidden_act {act!r} is not supported for this family", "known: silu")
    if config.get("mtp_use_dedicated_embeddings"):
        raise ModelError("config.json: mtp_use_dedicated_embeddings (an embedding of the MTP module) is not supported")


def _experts(config: Config) -> MoEConfig | None:
    """Experts chosen by a softmax, and a gated one for every row; None where there are none."""
    if not config.get("num_experts"):
        return None
    try:
        count, taken = int(config["num_experts"]), int(config["num_experts_per_tok"])
        inner, shared = int(config["moe_intermediate_size"]), int(config.get("shared_expert_intermediate_size") or 0)
        layers, step = int(config["num_hidden_layers"]), int(config.get("decoder_sparse_step") or 1)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json: {error} is missing or not a number", "experts need it") from None
    if min(taken, inner, step) < 1 or shared < 0 or taken > count:
        raise ModelError(f"config.json: a token cannot take {taken} of {count} experts of {inner} ({shared} shared)")
    dense = {i for i in range(layers) if (i + 1) % step} | set(config.get("mlp_only_layers") or ())
    router = RouterSpec(count, taken, normalize=bool(config.get("norm_topk_prob", True)))
    return MoEConfig(router=router, inner=inner, shared=shared, shared_gate=shared > 0, dense=frozenset(dense))


def _delta(config: Config, num_layers: int, tiled: bool) -> DeltaConfig | None:
    """The linear layers; None where there are none."""
    layers = frozenset(i for i, kind in enumerate(_layer_types(config, num_layers)) if kind == LINEAR)
    if not layers:
        return None
    try:
        key_heads, heads, key_dim, width = (
            int(config[f"linear_{name}"])
            for name in ("num_key_heads", "num_value_heads", "key_head_dim", "conv_kernel_dim")
        )
        value_dim = int(config.get("linear_value_head_dim") or config["linear_inner_size"] // heads)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"config.json: {error} is missing or not a number", "linear attention needs it") from None
    if min(key_heads, heads, key_dim, value_dim) < 1 or width < 2 or heads % key_heads:
        raise ModelError(
            f"config.json: linear attention has {heads} value heads of {value_dim}, {key_heads} key heads of {key_dim} "
            f"and a convolution of {width}",
            "value heads must be a multiple of key heads, a convolution at least 2 wide, all sizes positive",
        )
    return DeltaConfig(DeltaSpec(key_heads, heads, key_dim, value_dim, tiled), width, layers)


def _layer_types(config: Config, num_layers: int) -> list[str]:
    kinds = config.get("layer_types")
    if kinds is None and (recurrent := config.get("recurrent_layers")) is not None:  # a GGUF file's
        flags = recurrent if isinstance(recurrent, list) else [recurrent] * num_layers
        kinds = [LINEAR if flag else FULL for flag in flags[:num_layers]]
    if kinds is None:
        every = int(config.get("full_attention_interval") or 4)
        kinds = [FULL if (i + 1) % every == 0 else LINEAR for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ModelError(f"config.json: layer_types must name {num_layers} layers")
    if unknown := sorted({str(kind) for kind in kinds} - {LINEAR, FULL}):
        raise ModelError(f"config.json: layer type {unknown[0]!r} is not supported", f"known: {LINEAR}, {FULL}")
    return kinds


# Names.


def canonical(name: str) -> str | None:
    """Hugging Face's names, in a wrapper or not; the vision part is left out."""
    if re.match(r"(model\.)?visual\.", name):
        return None
    name = name.replace(".mlp.shared_expert.", ".mlp.shared_experts.")
    mtp = re.fullmatch(r"(?:model\.)?mtp\.(?:layers\.(\d+)\.)?(.+)", name)
    if mtp:
        index, rest = mtp.groups()
        if index is not None:
            return f"mtp.{index}.block.{rest}"
        part, _, kind = rest.rpartition(".")
        return f"mtp.0.{MTP_NAMES.get(part, part)}.{kind}"
    for prefix in WRAPPERS:
        if name.startswith(prefix):
            return without_prefix(name.removeprefix(prefix))
    return without_prefix(name)


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Norms as factors, the projections of a linear layer apart, the modules' shared tensors for each of them."""
    found = _from_gguf(tensors, config) if from_gguf else _from_hugging_face(tensors, config)
    if config.gated_attention:
        for name in [name for name in found if ".self_attn.q_proj." in name]:
            found |= _query_and_gate(name, found[name], config)
    for i in range(1, config.num_mtp):
        if f"mtp.{i}.block.input_layernorm.weight" in found:
            shared = {part: found.get(f"mtp.0.{part}.weight") for part in MTP_NAMES.values()}
            found |= {f"mtp.{i}.{part}.weight": tensor for part, tensor in shared.items() if tensor is not None}
    return found


def _from_hugging_face(tensors: dict[str, RawTensor], config: DecoderConfig) -> dict[str, RawTensor]:
    found: dict[str, RawTensor] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.partition(".linear_attn.")
        if config.delta and part == "in_proj_qkvz.weight":
            found |= _split(tensor, f"{stem}.linear_attn", _qkvz_rows(config.delta))
        elif config.delta and part == "in_proj_ba.weight":
            found |= _split(tensor, f"{stem}.linear_attn", _ba_rows(config.delta))
        elif part:
            found |= _linear_part(f"{stem}.linear_attn.", part, tensor)
        elif re.search(r"norm(_embedding|_hidden)?\.weight$", name):
            found[name] = tensor.affine(1, 1)
        else:
            found[name] = tensor
    return found


def _linear_part(prefix: str, part: str, tensor: RawTensor) -> dict[str, RawTensor]:
    """One tensor of a linear layer: a decay rate and convolution in our form, others as they are."""
    if part == "A_log":
        return {f"{prefix}decay_rate": tensor.exp().affine(-1, 0)}
    if part == "dt_bias":
        return {f"{prefix}decay_bias": tensor}
    if part == "conv1d.weight":
        return {f"{prefix}conv": _taps(tensor)}
    return {prefix + part: tensor}


def _from_gguf(tensors: dict[str, RawTensor], config: DecoderConfig) -> dict[str, RawTensor]:
    """llama.cpp has folded the norms and the decay rate."""
    renamed = {"ssm_a": "decay_rate", "ssm_dt.bias": "decay_bias", "ssm_conv1d.weight": "conv"}
    found: dict[str, RawTensor] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(?:layers|blk)\.(\d+)\.(.+)", name)
        if not match or config.delta is None or int(match[1]) not in config.delta.layers:
            found[name] = tensor
            continue
        prefix, rest = f"layers.{match[1]}", match[2]
        if rest == "ssm_ba.weight":
            found |= _split(tensor, f"{prefix}.linear_attn", _ba_rows(config.delta))
        elif rest in renamed:
            new = f"{prefix}.linear_attn.{renamed[rest]}"
            found[new] = _taps(tensor) if rest.startswith("ssm_conv") else tensor
        else:
            found[f"{prefix}.{rest.replace('self_attn.qkv_proj', 'linear_attn.in_proj_qkv')}"] = tensor
    return found


def _query_and_gate(name: str, tensor: RawTensor, config: DecoderConfig) -> dict[str, RawTensor]:
    """Rows of q_proj are [query, gate] by head."""
    spec = config.attention
    rows = np.arange(2 * spec.num_heads * spec.head_dim, dtype=np.int64).reshape(spec.num_heads, 2, -1)
    if tensor.shape[0] != rows.size:
        return {name: tensor, name.replace("q_proj", "gate_proj"): tensor}  # the loader says what is wrong
    parts = (Picked(tensor, rows[:, part].reshape(-1)) for part in (0, 1))
    return dict(zip((name, name.replace("q_proj", "gate_proj")), parts, strict=True))


def _taps(tensor: RawTensor) -> RawTensor:
    """[channels, (1,) width] -> [width * channels], so that a tap's channels lie side by side."""
    channels, size = tensor.shape[0], math.prod(tensor.shape)
    return tensor.shaped(channels, size // max(channels, 1)).transposed().shaped(size)


def _split(tensor: RawTensor, prefix: str, rows: dict[str, NDArray[np.int64]]) -> dict[str, RawTensor]:
    if sum(each.size for each in rows.values()) != tensor.shape[0]:
        return {tensor.name: tensor}  # the loader then misses the parts by name
    return {f"{prefix}.in_proj_{part}.weight": Picked(tensor, each) for part, each in rows.items()}


def _by_key_head(spec: DeltaSpec, sizes: Seq[int]) -> list[NDArray[np.int64]]:
    """Rows of parts that alternate within each key head."""
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


# Tiny models.

TINY = {
    "head_dim": 16, "partial_rotary_factor": 0.5, "full_attention_interval": 2, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip
"""Keys of a small config: linear and full layers in turn, three value heads to a key head."""
TINY_EXPERTS = {
    "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
}  # fmt: skip

SCRATCH = {
    "full_attention_interval": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}  # fmt: skip
SCRATCH_MOE = {**SCRATCH, **SCRATCH_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 64}


def tiny_hybrid(model_type: str, changes: Config, *, joined: bool) -> tuple[dict[str, Any], Arrays]:
    """A random small model. `joined`: the projections of a linear layer are in two tensors, by key head."""
    config = tiny_config(**{"model_type": model_type, **TINY, **changes})
    sizes = parse(config)
    arrays = random_arrays(_theirs(trunk_shapes(sizes, joined=joined) | mtp_shapes(sizes), sizes))
    for name, values in arrays.items():
        if name.endswith("norm.weight") or "pre_fc_norm" in name:
            arrays[name] = values if "linear_attn" in name else values - 1
        elif name.endswith("conv1d.weight"):
            arrays[name] = 5 * values  # of order 1 / sqrt(width)
        elif name.endswith("A_log"):  # states that forget in some three to thirty rows
            arrays[name] = np.log(np.geomspace(0.03, 0.5, len(values))).astype(np.float32)
    return config, arrays


def _theirs(shapes: dict[str, tuple[int, ...]], config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Where Hugging Face's names are not those of block_shapes: the gate is part of q_proj."""
    factor = 1 + config.gated_attention
    return {
        name.replace("shared_experts", "shared_expert"): (factor * shape[0], *shape[1:])
        if ".q_proj." in name
        else shape
        for name, shape in shapes.items()
        if ".self_attn.gate_proj." not in name
    }


def trunk_shapes(config: DecoderConfig, *, joined: bool) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a trunk."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for i in range(config.num_layers):
        block = block_shapes(f"model.layers.{i}", config, i)
        if config.delta and i in config.delta.layers:
            block = {name: shape for name, shape in block.items() if ".self_attn." not in name}
            block |= _linear_shapes(f"model.layers.{i}.linear_attn", config, config.delta, joined)
        shapes |= block
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _linear_shapes(prefix: str, config: DecoderConfig, delta: DeltaConfig, joined: bool) -> dict[str, tuple[int, ...]]:
    spec, hidden, inner = delta.delta, config.hidden_size, delta.inner
    projections = {"qkv": spec.channels, "z": inner, "b": spec.num_heads, "a": spec.num_heads}
    if joined:
        projections = {"qkvz": spec.channels + inner, "ba": 2 * spec.num_heads}
    return {
        **{f"{prefix}.in_proj_{part}.weight": (rows, hidden) for part, rows in projections.items()},
        f"{prefix}.conv1d.weight": (spec.channels, 1, delta.conv_width),
        f"{prefix}.dt_bias": (spec.num_heads,),
        f"{prefix}.A_log": (spec.num_heads,),
        f"{prefix}.norm.weight": (spec.value_dim,),
        f"{prefix}.out_proj.weight": (hidden, inner),
    }


def mtp_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of the MTP modules."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(config.num_mtp):
        shapes |= block_shapes(f"mtp.layers.{i}", config)
    if config.num_mtp:
        shapes |= {f"mtp.{name}.weight": (hidden,) for name in MTP_NAMES if name != "fc"}
        shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    return shapes
