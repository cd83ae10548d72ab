"""The weights that a checkpoint's tensors stand for: packed ones unpacked in shape, scales counted with their weight.

Layouts: vLLM's and transformers' readers of FP8 (per tensor, channel or block), compressed-tensors, GPTQ, AWQ, ModelOpt
NVFP4, MXFP4, bitsandbytes and MLX files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from headstart.formats.base import Tensor
from headstart.formats.symbols import lookup

Shape = tuple[int, ...]
Companion = tuple[str, str, Shape, int]
"""Last word of the name, dtype, shape and bytes of a tensor that belongs to a weight."""


class Stored(NamedTuple):
    """How a tensor is stored."""

    dtype: str
    shape: Shape


Scales = Mapping[str, Stored]

_OF_WEIGHT = frozenset({
    "weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale", "weight_zero_point", "weight_shape",
    "weight_g_idx", "weight_chan_scale", "input_scale", "input_global_scale", "input_zero_point", "output_scale",
    "output_zero_point", "SCB", "weight_format", "scale", "scales", "qzeros", "g_idx", "biases",
})  # fmt: skip
"""Last words of names that belong to the `.weight`, `.qweight` or `.weight_packed` beside them."""
_OF_NAME = frozenset({"absmax", "quant_map", "nested_absmax", "nested_quant_map"})
"""Last words after the weight's whole name (bitsandbytes)."""
_CACHE = frozenset({"k_scale", "v_scale", "q_scale", "prob_scale"})
"""Scales of keys and values: they belong to no weight."""
_FUSED = ("_scale_inv", "_scale_2", "_input_scale", "_weight_scale", "_scale", "_scales")
"""Endings of scales of fused experts, whose names have no `.weight`."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_TABLES = ("BOOL", "I64", "I32", "I16")
"""Types of masks and token ids: no parameters."""
PACKED = {"qweight", "weight_packed"}


class Weight(NamedTuple):
    """One weight. `shape` is None where packing hides it; `nbytes` counts its scales too."""

    shape: Shape | None
    kind: str
    parameters: int
    nbytes: int
    quantized: bool


def weights_of(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Weight]:
    """Weights by name; the name of a packed one ends in `.weight` too."""
    companions: dict[str, tuple[Companion, ...]] = {}
    main: dict[str, Tensor] = {}
    packed: dict[str, str] = {}
    for name, entry in tensors.items():
        base, _, last = name.rpartition(".")
        if last in ("weight", "bias"):
            main[name] = entry
        elif last in PACKED:
            packed[f"{base}.weight"] = last
            main[f"{base}.weight"] = entry
        elif owner := _owner(base, last, tensors):
            word = last if last in _OF_WEIGHT else name[len(owner) :]
            companions[owner] = (*companions.get(owner, ()), (word, entry.dtype, entry.shape, entry.nbytes))
        elif last not in _CACHE:
            main[name] = entry
    bits = _bits(config)
    return {
        name: _weight(each.dtype, each.shape, each.nbytes, packed.get(name, ""), companions.get(name, ()), bits)
        for name, each in main.items()
    }


def _owner(base: str, last: str, tensors: Mapping[str, Tensor]) -> str:
    """The name of the weight that a tensor belongs to; empty for one that is a weight itself."""
    if last in _OF_WEIGHT:
        weight = f"{base}.weight"
        return weight if weight in tensors or any(f"{base}.{word}" in tensors for word in PACKED) else ""
    if last in _OF_NAME:
        return base
    if last.startswith("bitsandbytes__"):
        return base.removesuffix(".quant_state")
    name = f"{base}.{last}" if base else last
    for ending in _FUSED:
        if name.endswith(ending):
            owner = name.removesuffix(ending)
            return next((each for each in (owner, f"{owner}_blocks") if each in tensors), "")
    return ""


def _bits(config: Mapping[str, Any]) -> int:
    """Bits of integer-packed weights, as the config says; 4 where it does not."""
    quantization = quantization_of(config)
    groups = quantization.get("config_groups")
    first: Any = next(iter(groups.values()), {}) if isinstance(groups, dict) else {}
    found = quantization.get("bits") or quantization.get("w_bit") or lookup(first, "weights.num_bits")
    return found if found in (1, 2, 3, 4, 5, 6, 8) else 4


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The quantization settings of a config.json; empty where there are none."""
    for place in ("quantization_config", "text_config.quantization_config", "quantization", "compression_config"):
        if isinstance(found := lookup(config, place), dict):
            return found
    return {}


@lru_cache(maxsize=4096)  # a checkpoint has few different ones
def _weight(dtype: str, shape: Shape, nbytes: int, packed: str, companions: tuple[Companion, ...], bits: int) -> Weight:
    scales = {word: Stored(scale_dtype, scale_shape) for word, scale_dtype, scale_shape, _ in companions}
    unpack = _UNPACK.get(packed) or (_by_type if companions else _as_it_is)
    logical, kind = unpack(Stored(dtype, shape), scales, bits)
    count = nbytes * 2 if logical is None else 0 if dtype in _TABLES and not companions else math.prod(logical)
    return Weight(logical, kind, count, nbytes + sum(each[3] for each in companions), kind not in _FLOATS + _TABLES)


def _as_it_is(entry: Stored, companions: Scales, bits: int) -> tuple[Shape | None, str]:
    return entry.shape, entry.dtype


def _integer_matrix(entry: Stored, companions: Scales, bits: int) -> tuple[Shape | None, str]:
    """GPTQ packs along the input, AWQ along the output; both store [in, out]."""
    if len(entry.shape) != 2:
        return None, f"int{bits}"
    rows, columns = entry.shape
    outputs = companions["scales"].shape[-1] if "scales" in companions and companions["scales"].shape else columns
    if outputs == columns:
        order = companions.get("g_idx")
        inputs = order.shape[0] if order and order.shape else rows * 32 // bits
        return (outputs, inputs), f"int{rows * 32 // inputs if inputs else bits} (gptq)"
    return (outputs, rows), f"int{columns * 32 // outputs if outputs else bits} (awq)"


def _compressed(entry: Stored, companions: Scales, bits: int) -> tuple[Shape | None, str]:
    """compressed-tensors: two 4-bit floats in a byte, or integers in 32-bit words, along the input."""
    if not entry.shape:
        return None, "packed"
    if entry.dtype == "U8":
        scale = companions.get("weight_scale")
        kind = "MXFP4" if scale and scale.dtype in ("U8", "F8_E8M0") else "NVFP4"
        return (*entry.shape[:-1], entry.shape[-1] * 2), kind
    return (*entry.shape[:-1], entry.shape[-1] * 32 // bits), f"int{bits} (compressed-tensors)"


_UNPACK: Mapping[str, Callable[[Stored, Scales, int], tuple[Shape | None, str]]] = {
    "qweight": _integer_matrix,
    "weight_packed": _compressed,
}


def _by_type(entry: Stored, companions: Scales, bits: int) -> tuple[Shape | None, str]:
    """A `.weight` whose companions say what its bytes mean."""
    if entry.dtype.startswith("F8_E"):
        return entry.shape, _fp8(entry, companions)
    if "SCB" in companions:
        return entry.shape, "int8 (bitsandbytes)"
    if entry.dtype == "U32" and "scales" in companions and entry.shape:
        return (*entry.shape[:-1], entry.shape[-1] * 32 // bits), f"int{bits} (mlx)"
    if any("absmax" in word for word in companions):
        return None, "4-bit (bitsandbytes)"
    if any(word == "_scales" for word in companions) and len(entry.shape) > 2:  # [..., groups, 16 bytes]
        return (*entry.shape[:-2], entry.shape[-2] * entry.shape[-1] * 2), "MXFP4"
    if entry.dtype in ("U8", "I8", "F4"):
        return _four_or_eight(entry, companions)
    return entry.shape, entry.dtype


def _fp8(entry: Stored, companions: Scales) -> str:
    scale = companions.get("weight_scale_inv") or companions.get("scale") or companions.get("weight_scale")
    if scale is None or len(scale.shape) < 2 or len(entry.shape) < 2 or 0 in scale.shape[-2:] or 1 in scale.shape[-2:]:
        return "FP8"
    rows, columns = (-(-size // count) for size, count in zip(entry.shape[-2:], scale.shape[-2:], strict=True))
    block = [1 << (size - 1).bit_length() if size > 1 else size for size in (rows, columns)]
    return f"FP8 ({block[0]}x{block[1]} blocks)"


def _four_or_eight(entry: Stored, companions: Scales) -> tuple[Shape, str]:
    """Bytes with scales: two 4-bit floats each, where the scales' groups say so, else 8-bit integers."""
    scale = next((companions[word] for word in ("weight_scale", "scale") if word in companions), None)
    doubled = (*entry.shape[:-1], entry.shape[-1] * 2) if entry.shape else entry.shape
    groups = scale.shape[-1] if scale and len(scale.shape) > 1 else 0
    if entry.dtype == "F4":
        return entry.shape, "FP4"
    if groups and doubled[-1] in (16 * groups, 32 * groups):
        return doubled, "NVFP4" if doubled[-1] == 16 * groups else "MXFP4"
    return entry.shape, "int8"
