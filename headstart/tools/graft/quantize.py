"""FP8 in blocks of 128 x 128: `weight` in E4M3 and `weight_scale_inv` in float32, DeepSeek-V3's own layout.

vLLM, SGLang and transformers read it (`quant_method: fp8` with `weight_block_size`). No engine reads an int8 or int4
layout for a head alone, so there is no other choice here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import UsageError
from headstart.formats.base import Tensor, make_tensor
from headstart.formats.quantization import quantizations
from headstart.formats.safetensors import Planned

BLOCK = 128
LARGEST = 448.0
CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def excluding(quantization: Mapping[str, Any], modules: list[str]) -> dict[str, Any] | None:
    """quantization_config with `modules` left alone; None for a method that has no known way to say so."""
    method = str(quantization.get("quant_method") or _unnamed(quantization))
    key = next((each.excludes[method] for each in quantizations().values() if method in each.excludes), None)
    if key is None:
        return None
    if key == "dynamic":  # rules by regular expression
        rules: dict[str, Any] = {f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in modules}
        return {**quantization, key: {**(quantization.get(key) or {}), **rules}}
    if key == "extra_config":  # settings of single layers
        plain = {name: {"bits": 16, "data_type": "float"} for name in modules}
        return {**quantization, key: {**(quantization.get(key) or {}), **plain}}
    listed = list(quantization.get(key) or [])
    return {**quantization, key: listed + [name for name in modules if name not in listed]}


def _unnamed(quantization: Mapping[str, Any]) -> str:
    """The method of a config that does not name it, as old ones of bitsandbytes."""
    return "bitsandbytes" if any(key.startswith(("load_in_", "llm_int8_", "bnb_4bit_")) for key in quantization) else ""


def check_method(quantization: Mapping[str, Any]) -> None:
    """Raises UsageError for a checkpoint whose config cannot describe FP8 blocks beside what it has."""
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if quantization and (method != "fp8" or block != [BLOCK, BLOCK]):
        what = f"quantized by {method!r} (blocks {block}), and its config has no room for a second method"
        hint = f"it goes with unquantized checkpoints and with fp8 in blocks of {BLOCK} x {BLOCK}; else leave it out"
        raise UsageError(f"--quantize-head: the checkpoint is {what}", hint)


def planned(name: str, stored: Tensor) -> list[Planned]:
    """A matrix [rows, columns] as codes and scales [ceil(rows / 128), ceil(columns / 128)]."""
    grid = tuple(-(-size // BLOCK) for size in stored.shape)
    return [
        Planned(name, "F8_E4M3", stored.shape, lambda: _codes(stored)),
        Planned(f"{name}_scale_inv", "F32", grid, lambda: (scale for _, scale in _slabs(stored))),
    ]


def _slabs(stored: Tensor) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """128 rows at a time, and the scale of each of its blocks."""
    rows, columns = stored.shape
    for begin in range(0, rows, BLOCK):
        count = min(BLOCK, rows - begin)
        values = stored.span(begin, count).float32()
        largest = np.maximum.reduceat(np.abs(values).max(axis=0), np.arange(0, columns, BLOCK))
        yield values, np.where(largest > 0, largest / LARGEST, 1).astype(np.float32)


def _codes(stored: Tensor) -> Iterator[NDArray[Any]]:
    for values, scale in _slabs(stored):
        yield nearest_e4m3(values / np.repeat(scale, BLOCK)[: values.shape[1]])


@cache
def _e4m3_values() -> NDArray[np.float32]:
    """The finite sizes, ascending: code i is the i-th."""
    return make_tensor("", (127,), "F8_E4M3", np.arange(127, dtype=np.uint8)).float32()


def nearest_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes of the nearest numbers, ties to the even code; sizes above 448 become 448."""
    sizes = _e4m3_values()
    middles = (sizes[1:] + sizes[:-1]) / 2
    size = np.abs(values)
    below, above = np.searchsorted(middles, size, "left"), np.searchsorted(middles, size, "right")
    codes = np.where(below % 2, above, below).astype(np.uint8)  # they differ at a tie only
    return np.asarray(codes | (np.signbit(values) * np.uint8(128)), np.uint8)
