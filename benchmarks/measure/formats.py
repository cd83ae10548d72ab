"""Random weights as files of each quantization have them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.formats.base import ITEM_BYTES
from headstart.formats.grouped import NF4

Shape = tuple[int, ...]
Generator = np.random.Generator


class Part(NamedTuple):
    """One tensor of a file; `make` fills it."""

    name: str
    dtype: str
    shape: Shape
    make: Callable[[Generator], NDArray[Any]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Stored = Callable[[str, Shape], Iterator[Part]]
"""Name and shape of a matrix -> what stands for it."""


def small(rng: Generator, shape: Shape) -> NDArray[np.uint16]:
    """bfloat16 of magnitudes that leave a model finite."""
    return rng.integers(0, 1 << 16, shape, np.uint16) & 0x807F | 0x3C80


def _e4m3(rng: Generator, shape: Shape) -> NDArray[np.uint8]:
    return rng.integers(0, 0x40, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7


def _bytes(shape: Shape, low: int = 0, high: int = 256) -> Callable[[Generator], NDArray[np.uint8]]:
    return lambda rng: rng.integers(low, high, shape, np.uint8)


def _all(value: Any, shape: Shape) -> Callable[[Generator], NDArray[Any]]:
    return lambda rng: np.full(shape, value)


def fp8_blocks(name: str, shape: Shape) -> Iterator[Part]:
    grid = tuple(-(-size // 128) for size in shape)
    yield Part(name, "F8_E4M3", shape, lambda rng: _e4m3(rng, shape))
    yield Part(f"{name}_scale_inv", "F32", grid, _all(np.float32(0.02), grid))


def fp8_rows(name: str, shape: Shape) -> Iterator[Part]:
    yield Part(name, "F8_E4M3", shape, lambda rng: _e4m3(rng, shape))
    yield Part(f"{name}_scale", "BF16", (shape[0], 1), lambda rng: small(rng, (shape[0], 1)) & 0x7FFF)


def mxfp8(name: str, shape: Shape) -> Iterator[Part]:
    grid = (shape[0], shape[1] // 32)
    yield Part(name, "F8_E4M3", shape, lambda rng: _e4m3(rng, shape))
    yield Part(f"{name}_scale", "U8", grid, _bytes(grid, 120, 123))


def int8(name: str, shape: Shape) -> Iterator[Part]:
    yield Part(name, "I8", shape, _bytes(shape))
    yield Part(f"{name}_scale", "BF16", (shape[0], 1), lambda rng: np.full((shape[0], 1), 0x3980, np.uint16))


def nvfp4(name: str, shape: Shape) -> Iterator[Part]:
    pairs, grid = (shape[0], shape[1] // 2), (shape[0], shape[1] // 16)
    yield Part(name, "U8", pairs, _bytes(pairs))
    yield Part(f"{name}_scale", "F8_E4M3", grid, _bytes(grid, 0x30, 0x60))
    yield Part(f"{name}_scale_2", "F32", (), _all(np.float32(1e-3), ()))


def mxfp4(name: str, shape: Shape) -> Iterator[Part]:
    pairs, grid = (shape[0], shape[1] // 2), (shape[0], shape[1] // 32)
    yield Part(f"{name}_packed", "U8", pairs, _bytes(pairs))
    yield Part(f"{name}_scale", "U8", grid, _bytes(grid, 120, 123))


def nf4(name: str, shape: Shape) -> Iterator[Part]:
    count, blocks = math.prod(shape) // 2, math.prod(shape) // 64
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape), "nested_blocksize": 256,
        "nested_dtype": "float32", "nested_offset": 0.05,
    }  # fmt: skip
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    outer = (-(-blocks // 256),)
    yield Part(name, "U8", (count, 1), _bytes((count, 1)))
    yield Part(f"{name}.absmax", "U8", (blocks,), _bytes((blocks,)))
    yield Part(f"{name}.quant_map", "F32", (16,), lambda rng: NF4)
    yield Part(f"{name}.nested_absmax", "F32", outer, _all(np.float32(0.02), outer))
    yield Part(f"{name}.nested_quant_map", "F32", (256,), lambda rng: np.linspace(-1, 1, 256, dtype=np.float32))
    yield Part(f"{name}.quant_state.bitsandbytes__nf4", "U8", text.shape, lambda rng: text)


def _words(name: str, codes: Shape, points: Shape, scales: Shape) -> Iterator[Part]:
    base = name.removesuffix("weight")
    for word, grid in (("qweight", codes), ("qzeros", points)):
        yield Part(
            f"{base}{word}", "I32", grid, lambda rng, grid=grid: rng.integers(-(1 << 31), 1 << 31, grid, np.int32)
        )
    yield Part(f"{base}scales", "F16", scales, _all(np.float16(3e-3), scales))


def awq(name: str, shape: Shape) -> Iterator[Part]:
    rows, columns, groups = *shape, shape[1] // 128
    return _words(name, (columns, rows // 8), (groups, rows // 8), (groups, rows))


def gptq(name: str, shape: Shape) -> Iterator[Part]:
    rows, columns, groups = *shape, shape[1] // 128
    return _words(name, (columns // 8, rows), (groups, rows // 8), (groups, rows))


FORMATS: Mapping[str, tuple[dict[str, Any], Stored]] = {
    "fp8": ({"quant_method": "compressed-tensors"}, fp8_rows),
    "mxfp8": ({"quant_method": "compressed-tensors"}, mxfp8),
    "int8": ({"quant_method": "compressed-tensors"}, int8),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4),
    "mxfp4": ({"quant_method": "compressed-tensors"}, mxfp4),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, gptq),
}
"""Name -> quantization_config of the model, and its matrices."""
