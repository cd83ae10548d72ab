"""Random matrices in the storage formats of published quantizations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.formats.grouped import NF4

Shape = tuple[int, ...]
Generator = np.random.Generator
Stored = dict[str, tuple[NDArray[Any], str]]
"""Tensor name -> values and safetensors dtype."""


def _e4m3(rng: Generator, shape: Shape) -> NDArray[np.uint8]:
    return rng.integers(0, 0x40, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7


def _bytes(rng: Generator, shape: Shape, low: int = 0, high: int = 256) -> NDArray[np.uint8]:
    return rng.integers(low, high, shape, np.uint8)


def _fp8_blocks(rng: Generator, name: str, shape: Shape) -> Stored:
    grid = tuple(-(-size // 128) for size in shape)
    return {
        name: (_e4m3(rng, shape), "F8_E4M3"),
        f"{name}_scale_inv": (np.full(grid, 0.02, np.float32), "F32"),
    }  # fmt: skip


def _fp8_rows(rng: Generator, name: str, shape: Shape) -> Stored:
    scales = rng.integers(0, 1 << 16, (shape[0], 1), np.uint16) & 0x7F | 0x3C80  # bfloat16 bits
    return {name: (_e4m3(rng, shape), "F8_E4M3"), f"{name}_scale": (scales, "BF16")}


def _mxfp8(rng: Generator, name: str, shape: Shape) -> Stored:
    scales = _bytes(rng, (shape[0], shape[1] // 32), 120, 123)
    return {name: (_e4m3(rng, shape), "F8_E4M3"), f"{name}_scale": (scales, "U8")}


def _int8(rng: Generator, name: str, shape: Shape) -> Stored:
    scales = np.full((shape[0], 1), 0x3980, np.uint16)
    return {name: (_bytes(rng, shape), "I8"), f"{name}_scale": (scales, "BF16")}


def _nvfp4(rng: Generator, name: str, shape: Shape) -> Stored:
    return {
        name: (_bytes(rng, (shape[0], shape[1] // 2)), "U8"),
        f"{name}_scale": (_bytes(rng, (shape[0], shape[1] // 16), 0x30, 0x60), "F8_E4M3"),
        f"{name}_scale_2": (np.full((), 1e-3, np.float32), "F32"),
    }


def _mxfp4(rng: Generator, name: str, shape: Shape) -> Stored:
    return {
        f"{name}_packed": (_bytes(rng, (shape[0], shape[1] // 2)), "U8"),
        f"{name}_scale": (_bytes(rng, (shape[0], shape[1] // 32), 120, 123), "U8"),
    }


def _nf4(rng: Generator, name: str, shape: Shape) -> Stored:
    count, blocks = math.prod(shape) // 2, math.prod(shape) // 64
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape), "nested_blocksize": 256,
        "nested_dtype": "float32", "nested_offset": 0.05,
    }  # fmt: skip
    return {
        name: (_bytes(rng, (count, 1)), "U8"),
        f"{name}.absmax": (_bytes(rng, (blocks,)), "U8"),
        f"{name}.quant_map": (NF4, "F32"),
        f"{name}.nested_absmax": (np.full((-(-blocks // 256),), 0.02, np.float32), "F32"),
        f"{name}.nested_quant_map": (np.linspace(-1, 1, 256, dtype=np.float32), "F32"),
        f"{name}.quant_state.bitsandbytes__nf4": (np.frombuffer(json.dumps(state).encode(), np.uint8), "U8"),
    }


def _int4_words(rng: Generator, name: str, codes: Shape, points: Shape, scales: Shape) -> Stored:
    base = name.removesuffix("weight")

    def words(shape: Shape) -> NDArray[np.int32]:
        return rng.integers(-(1 << 31), 1 << 31, shape, np.int32)

    return {
        f"{base}qweight": (words(codes), "I32"),
        f"{base}qzeros": (words(points), "I32"),
        f"{base}scales": (np.full(scales, 3e-3, np.float16), "F16"),
    }


def _awq(rng: Generator, name: str, shape: Shape) -> Stored:
    rows, columns, groups = *shape, shape[1] // 128
    return _int4_words(rng, name, (columns, rows // 8), (groups, rows // 8), (groups, rows))


def _gptq(rng: Generator, name: str, shape: Shape) -> Stored:
    rows, columns, groups = *shape, shape[1] // 128
    return _int4_words(rng, name, (columns // 8, rows), (groups, rows // 8), (groups, rows))


FORMATS: Mapping[str, tuple[Mapping[str, Any], Callable[[Generator, str, Shape], Stored]]] = {
    "fp8_blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, _fp8_blocks),
    "fp8": ({"quant_method": "compressed-tensors"}, _fp8_rows),
    "mxfp8": ({"quant_method": "compressed-tensors"}, _mxfp8),
    "int8": ({"quant_method": "compressed-tensors"}, _int8),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, _nvfp4),
    "mxfp4": ({"quant_method": "compressed-tensors"}, _mxfp4),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, _nf4),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, _awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, _gptq),
}
"""Name -> (quantization_config of the model, tensors of one matrix)."""
