"""MXFP4: FP4 (E2M1) with a power of two for 32 columns, two codes in a byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Tensor, make_tensor
from headstart.formats.quantization import Decode, Described, Quantization, Stored, WeightBytes
from headstart.formats.quantized._four_bits import codes, group_of, unpacked
from headstart.formats.quantized._scaled import scaled
from headstart.formats.rows import Deferred

GROUP = 32
BYTES = 0.5 + 1 / 32


def describe(stored: Stored) -> Described | None:
    shape = stored.main.shape
    if "_scales" in stored.beside and len(shape) > 2:  # [..., groups, 16 bytes]
        return Described((*shape[:-2], shape[-2] * shape[-1] * 2), "MXFP4")
    return Described(unpacked(shape), "MXFP4") if group_of(stored) == GROUP else None


@dataclass(frozen=True, eq=False)
class Blocks(Deferred):
    """gpt-oss's stacks as ggml's blocks, bit for bit: a RawTensor [..., rows, columns] over bytes [.., groups, 16] and
    powers [.., groups]. `first`: the row (leading dimensions are one) that its rows begin with."""

    stored: Stored
    shape: tuple[int, ...]
    first: int = 0

    dtype = "MXFP4"

    @property
    def name(self) -> str:
        return self.stored.name

    def fingerprint(self) -> int:
        return self.stored.main.fingerprint() + self.first

    def read(self) -> Tensor:
        return self._made(np.arange(math.prod(self.shape[:-1])), self.shape)

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        return self._made(rows, (len(rows), self.shape[-1])) if len(self.shape) == 2 else self.read().take_rows(rows)

    def part(self, index: int) -> Blocks:
        return Blocks(self.stored, self.shape[1:], self.first + index * math.prod(self.shape[1:-1]))

    def _made(self, rows: NDArray[np.int64], shape: tuple[int, ...]) -> Tensor:
        groups, chosen = shape[-1] // GROUP, np.asarray(rows) + self.first
        powers = self.stored.beside["_scales"].data.reshape(-1, groups)[chosen]
        pairs = self.stored.main.data.reshape(-1, groups, GROUP // 2)[chosen]
        codes = np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(-1, groups, GROUP)
        halves = codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4  # column i beside column 16 + i
        blocks = np.concatenate((powers[..., None], halves), axis=-1)
        return make_tensor(self.name, shape, self.dtype, blocks.reshape(-1))


def whole(stored: Stored) -> Blocks | None:
    """gpt-oss's: [..., rows, groups, 16] bytes and [..., rows, groups] powers."""
    scales, shape = stored.beside.get("_scales"), stored.main.shape
    if scales is None or len(shape) < 3:
        return None
    if shape[-1] != GROUP // 2 or scales.shape != shape[:-1] or {scales.dtype, stored.main.dtype} != {"U8"}:
        raise ModelError(
            f"{scales.name} is {scales.dtype} {list(scales.shape)}, but {stored.main.name} is "
            f"{stored.main.dtype} {list(shape)}: MXFP4 has a byte for each 16 bytes"
        )
    return Blocks(stored, (*shape[:-2], shape[-2] * GROUP))


def decode(stored: Stored) -> Decode | None:
    if blocks := whole(stored):
        flat = Blocks(stored, (math.prod(blocks.shape[:-1]), blocks.shape[-1]))
        return lambda rows: flat.take_rows(rows).float32()
    main, scale = stored.main, stored.scale
    if len(main.shape) < 2 or scale is None or scale.shape[:-1] != main.shape[:-1] or main.dtype not in ("U8", "I8"):
        return None
    return scaled(stored, unpacked(main.shape), codes, (1, GROUP))


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") == "mxfp4",
    packed=("weight_packed",),
    beside=("weight_scale", "scale"),
    after=("_scales",),
    describe=describe,
    decode=decode,
    whole=whole,
    bits=4,
    plans={"mxfp4": WeightBytes(2, 2, BYTES, 2), "fp4-fp8": WeightBytes(1, 1, BYTES, 2, "fp8")},
)
