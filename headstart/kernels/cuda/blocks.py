"""GGUF's blocks as numbers, scales and offsets: value = (number - zero) * scale + offset, in groups of columns.

Layouts: ggml-common.h of llama.cpp. Raw rows are uint8 [n, bytes]; U groups of a row. Products of two scales are exact
in float32, so values are those of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Raw = NDArray[np.uint8]
SUPER = 256
"""Weights of a block of a K-quant."""


@dataclass(frozen=True)
class Unpacked:
    """Rows of a matrix: `codes` [n, K], or `packed` two in a byte [n, K / 2]; `scales` and `offsets` [n, U]. `levels`
    [16] that codes are places in; `float8`: codes are E4M3. `wide`: bfloat16 does not hold the numbers."""

    codes: Any
    group: int
    scales: Any
    offsets: Any = None
    zero: int = 0
    packed: bool = False
    levels: Any = None
    float8: bool = False
    wide: bool = False


def _half(raw: Raw) -> NDArray[np.float32]:
    """float16 [..., 2 n bytes] -> float32 [..., n]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _blocks(raw: Raw, size: int) -> Raw:
    return raw.reshape(len(raw), -1, size)


def _halves(raw: Raw) -> Raw:
    """Bytes [..., n] -> their low halves, then their high ones, [..., 2 n]."""
    return np.asarray(np.concatenate((raw & 15, raw >> 4), axis=-1), np.uint8)


def _pairs(codes: Raw) -> Raw:
    """Codes of 4 bits [n, K] -> two in a byte."""
    flat = codes.reshape(len(codes), -1)
    return np.asarray(flat[:, ::2] | (flat[:, 1::2] << 4), np.uint8)


def _flat(values: NDArray[Any]) -> NDArray[Any]:
    return values.reshape(len(values), -1)


def _bits(raw: Raw, count: int) -> Raw:
    """The lowest `count` bits of each byte, [..., n] -> [..., count * n]: all first bits, then all second ones, ..."""
    return np.asarray(np.concatenate([(raw >> i) & 1 for i in range(count)], axis=-1), np.uint8)


def q4_0(raw: Raw, columns: int) -> Unpacked:
    blocks = _blocks(raw, 18)
    codes = _pairs(_halves(blocks[..., 2:]))
    return Unpacked(codes, 32, _flat(_half(blocks[..., :2])), zero=8, packed=True)


def q4_1(raw: Raw, columns: int) -> Unpacked:
    blocks = _blocks(raw, 20)
    codes = _pairs(_halves(blocks[..., 4:]))
    return Unpacked(codes, 32, _flat(_half(blocks[..., :2])), _flat(_half(blocks[..., 2:4])), packed=True)


def _fifth(bits: Raw) -> Raw:
    """Bit i of 32 [..., 4] -> 16 at place i, [..., 32]."""
    return np.asarray(np.unpackbits(np.ascontiguousarray(bits), axis=-1, bitorder="little") << 4, np.uint8)


def q5_0(raw: Raw, columns: int) -> Unpacked:
    blocks = _blocks(raw, 22)
    codes = (_halves(blocks[..., 6:]) | _fifth(blocks[..., 2:6])).astype(np.int8) - np.int8(16)
    return Unpacked(_flat(codes), 32, _flat(_half(blocks[..., :2])))


def q5_1(raw: Raw, columns: int) -> Unpacked:
    blocks = _blocks(raw, 24)
    codes = _halves(blocks[..., 8:]) | _fifth(blocks[..., 4:8])
    return Unpacked(_flat(codes), 32, _flat(_half(blocks[..., :2])), _flat(_half(blocks[..., 2:4])))


def q8_0(raw: Raw, columns: int) -> Unpacked:
    blocks = _blocks(raw, 34)
    return Unpacked(_flat(blocks[..., 2:].view(np.int8)), 32, _flat(_half(blocks[..., :2])))


def _six_bits(raw: Raw) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Eight scales and eight minima of 6 bits in 12 bytes."""
    first, second, high = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    scales = np.concatenate((first & 63, (high & 15) | (first >> 6) << 4), axis=-1)
    lows = np.concatenate((second & 63, (high >> 4) | (second >> 6) << 4), axis=-1)
    return scales.astype(np.float32), lows.astype(np.float32)


def _scaled(blocks: Raw) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scales and offsets [n, U] of a block that begins with d, dmin and 12 bytes."""
    scales, lows = _six_bits(blocks[..., 4:16])
    return _flat(_half(blocks[..., :2]) * scales), _flat(-_half(blocks[..., 2:4]) * lows)


def q4_k(raw: Raw, columns: int) -> Unpacked:
    blocks = _blocks(raw, 144)
    codes = _halves(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return Unpacked(_pairs(_flat(codes)), 32, *_scaled(blocks), packed=True)


def q5_k(raw: Raw, columns: int) -> Unpacked:
    blocks = _blocks(raw, 176)
    low = _halves(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], -1)
    return Unpacked(_flat(low | _bits(blocks[..., 16:48], 8) << 4), 32, *_scaled(blocks))


def q6_k(raw: Raw, columns: int) -> Unpacked:
    blocks = _blocks(raw, 210)
    shape = (*blocks.shape[:2], 2, -1)  # two halves of 128 weights
    low, high = blocks[..., :128].reshape(shape), blocks[..., 128:192].reshape(shape)
    upper = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1) << 4
    codes = (_halves(low) | upper).astype(np.int8) - np.int8(32)
    scales = _half(blocks[..., 208:]) * blocks[..., 192:208].view(np.int8).astype(np.float32)
    return Unpacked(_flat(codes), 16, _flat(scales))


BLOCKS: Mapping[str, Callable[[Raw, int], Unpacked]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
}  # fmt: skip
"""Types that are kept in about their own size; of others the values are taken."""
