"""Quantized weights that are integers times scales, repacked for the kernels: into ggml blocks if these hold every
value, else into groups with zero points (formats.grouped), else as floats."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.core import Int64
from headstart.errors import ModelError
from headstart.formats.base import Tensor, make_tensor
from headstart.formats.grouped import Layout, joined, layout_of
from headstart.formats.rows import Deferred

BLOCK, GROUP = 32, 64


@dataclass(frozen=True, eq=False)
class Integers:
    """A weight [rows, columns]: value[r, c] = (codes[r, c] - zeros[r, g]) * scales[r, g], with g = groups[c].

    `codes` returns the codes, of `bits` bits, of rows [n] as [n, columns]. zeros and scales: [rows, groups]. `groups`:
    [columns]. Raises ModelError for scales that are not finite, and for columns of a missing group."""

    name: str
    codes: Callable[[Int64], NDArray[np.int32]]
    zeros: NDArray[np.int32]
    scales: NDArray[np.float32]
    groups: NDArray[np.int64]
    bits: int

    def __post_init__(self) -> None:
        if not np.isfinite(self.scales).all():
            raise ModelError(f"the scales of {self.name} are not all numbers", "download the model again")
        if self.groups.min() < 0 or self.groups.max() >= self.scales.shape[1]:
            what = f"columns of {self.name} are of groups {self.groups.min()} to {self.groups.max()}"
            raise ModelError(f"{what}, but it has {self.scales.shape[1]}", "are its scales of another group size?")

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.scales), len(self.groups)

    @cached_property
    def dtype(self) -> str:
        """The dtype of the repacked weight, which holds every value: Q4_0 or Q8_0 of ggml, a type of formats.grouped,
        else F16, or F32 if the scales do not fit float16."""
        lowest, highest = -int(self.zeros.max()), (1 << self.bits) - 1 - int(self.zeros.min())
        group, scale = self._group, self._scale
        if group and len(self.groups) % BLOCK == 0 and scale == "F16":  # required by ggml's blocks
            if lowest >= -8 and highest <= 7:
                return "Q4_0"
            if self.bits > 4 and lowest >= -128 and highest <= 127:
                return "Q8_0"
        if group and self.bits <= 4 and self.zeros.min() >= 0 and self.zeros.max() < 256:
            return f"U4:{group}:{scale}"
        if group == GROUP and self.bits == 8 and self.zeros.min() == self.zeros.max() == 128 and scale != "F16":
            return f"I8:{group}:{scale}"
        if group == GROUP and self.bits == 8 and self.zeros.min() >= 0 and self.zeros.max() < 256:
            return f"U8:{group}:{scale}"
        return "F16" if scale == "F16" else "F32"

    @cached_property
    def _group(self) -> int:
        """64 or 32 if every aligned run of so many columns is in one group, else 0."""
        for size in (GROUP, BLOCK):
            filled = np.pad(self.groups, (0, -len(self.groups) % size), mode="edge")
            if not np.ptp(filled.reshape(-1, size), axis=1).any():
                return size
        return 0

    @cached_property
    def _scale(self) -> str:
        """The narrowest of F16, BF16 and F32 that holds all scales exactly."""
        with np.errstate(over="ignore"):
            if np.array_equal(self.scales.astype(np.float16).astype(np.float32), self.scales):
                return "F16"
        return "F32" if (np.ascontiguousarray(self.scales).view(np.uint32) & 0xFFFF).any() else "BF16"

    def centered(self, rows: Int64) -> NDArray[np.int32]:
        """Codes minus their zero points, [n, columns]."""
        return np.asarray(self.codes(rows) - self.zeros[rows][:, self.groups])

    def values(self, rows: Int64) -> NDArray[np.float32]:
        return np.asarray(self.centered(rows) * self.scales[rows][:, self.groups], np.float32)

    def raw(self, rows: Int64) -> NDArray[np.uint8]:
        """Rows encoded as `dtype`, uint8 [n, bytes of a row]."""
        if self.dtype in ("F16", "F32"):
            return self.values(rows).astype(np.float16 if self.dtype == "F16" else np.float32).view(np.uint8)
        if layout := layout_of(self.dtype):
            return self._grouped(rows, layout)
        codes = self.centered(rows).reshape(len(rows), -1, BLOCK)
        scales = self.scales[rows][:, self.groups[::BLOCK]].astype(np.float16)[..., None].view(np.uint8)
        if self.dtype == "Q4_0":  # a byte holds columns i and 16 + i
            nibbles = (codes + 8).astype(np.uint8)
            body = nibbles[..., : BLOCK // 2] | nibbles[..., BLOCK // 2 :] << 4
        else:
            body = codes.astype(np.int8).view(np.uint8)
        return np.concatenate((scales, body), axis=-1).reshape(len(rows), -1)

    def _grouped(self, rows: Int64, layout: Layout) -> NDArray[np.uint8]:
        of = self.groups[:: layout.group]
        scales: NDArray[Any] = np.ascontiguousarray(self.scales[rows][:, of])
        if layout.scale == "BF16":
            scales = scales.view(np.uint32) >> 16
        codes: NDArray[Any] = self.codes(rows).astype(np.uint8)
        if layout.codes == "U4":
            codes = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        return joined(layout, codes, scales, self.zeros[rows][:, of] if layout.has_points else None)


@dataclass(frozen=True, eq=False)
class Regrouped(Deferred):
    """A RawTensor of an `Integers` weight, repacked at each access. Scales and zero points are not kept in memory: as
    32-bit numbers they would be an eighth of the file."""

    name: str
    shape: tuple[int, int]
    dtype: str
    make: Callable[[], Integers]
    main: Tensor

    def fingerprint(self) -> int:
        return self.main.fingerprint()

    def take_rows(self, rows: Int64) -> Tensor:
        raw = self.make().raw(np.asarray(rows))
        return make_tensor(self.name, (len(rows), self.shape[1]), self.dtype, np.ascontiguousarray(raw).reshape(-1))


def equal_groups(columns: int, count: int, name: str) -> NDArray[np.int64]:
    """int64 [columns]: the group of each of the columns in `count` groups of one size. Raises ModelError, which names
    the tensor, if they do not make such groups."""
    if not count or columns % count:
        raise ModelError(f"{name}: {columns} columns do not make {count} groups of one size")
    return np.arange(columns) // (columns // count)


def unpacked(words: NDArray[np.int32], bits: int, order: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """The numbers of `bits` bits in 32-bit words [n, w], int32 [n, w * 32 / bits]. The i-th lowest bits of a word are
    its number i, or order[i] if `order` is given."""
    words = np.ascontiguousarray(words)
    count = 32 // bits
    shifts = np.arange(count, dtype=np.uint32) * bits
    places = np.argsort(order) if order else np.arange(count)
    numbers = words.view(np.uint32)[..., None] >> shifts[places] & np.uint32((1 << bits) - 1)
    return numbers.reshape(len(words), -1).astype(np.int32)
