"""Weights on the device: numbers in about their file's own size, with the scales of groups; no value is changed.

Shapes: N rows, K columns, U groups of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.config import Quantization
from headstart.formats.base import Tensor as FileTensor, e4m3_table, make_tensor
from headstart.formats.grouped import LEVELS as LEVEL_LISTS, Layout, layout_of, split
from headstart.kernels.cuda.blocks import BLOCKS, Unpacked
from headstart.kernels.cuda.device import Device, said
from headstart.kernels.ops import RawTensor

PLAIN, NIBBLES, FLOAT8, LEVELS = range(4)
"""As in kernels/products.py."""
ROWS_AT_ONCE = 16 << 20
"""Elements that are unpacked at a time: a large table need not lie in memory twice."""
_PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NUMPY = {"BF16": np.int16, "F16": np.float16, "F32": np.float32}
_QUANTIZED = {"int8": "Q8_0", "int4": "Q4_1"}
_BITS = {"int8": 9, "int4": 5}


@dataclass(frozen=True, eq=False)
class Matrix:
    """[rows, columns] = number * scale + offset, by groups of columns; group 0: numbers alone. `codes` [N, K], or two
    in a byte [N, K / 2], the even column in the low half, less `zero`; `scales`, `offsets` (or none) [N, U]; `levels`
    [16]. `wide`: bfloat16 does not hold the numbers."""

    kind: int
    rows: int
    columns: int
    codes: Tensor
    group: int = 0
    zero: int = 0
    scales: Tensor | None = None
    offsets: Tensor | None = None
    levels: Tensor | None = None
    wide: bool = False

    @property
    def units(self) -> int:
        return -(-self.columns // self.group) if self.group else 0

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.offsets) if t is not None)


def to_device(tensor: RawTensor, device: Device, quantization: Quantization | None = None) -> Matrix:
    """A file's matrix as kernels read it. `quantization` rounds to groups of 32 what has more bits than that. Raises
    ModelError where memory runs out."""
    rows, columns = tensor.shape
    if quantization and columns % 32 == 0 and _bits(tensor) > _BITS[quantization]:
        return _unpacked(tensor, _QUANTIZED[quantization], device, rounded=True)
    if tensor.dtype in BLOCKS:
        return _unpacked(tensor, tensor.dtype, device)
    layout = layout_of(tensor.dtype)
    if layout is not None and _fits(layout.group, columns):
        return _unpacked(tensor, layout, device)
    kept = tensor.dtype if tensor.dtype in _PLAIN else "F32"
    with said(f"the weight {tensor.name}"):
        codes = torch.empty((rows, columns), dtype=_PLAIN[kept], device=device.place)
    for begin, part in _parts(tensor):
        values: NDArray[Any] = part.float32()  # a view, where these are floats
        if isinstance(part, FileTensor) and part.dtype == kept != "F32":
            values = part.data.reshape(-1).view(_NUMPY[kept])
        codes[begin : begin + part.shape[0]] = _tensor(values.reshape(part.shape)).view(_PLAIN[kept])
    return Matrix(PLAIN, rows, columns, codes, wide=kept != "BF16")


def _bits(tensor: RawTensor) -> float:
    """Of one weight in its file."""
    return 8 * tensor.nbytes / (tensor.shape[0] * tensor.shape[1]) if isinstance(tensor, FileTensor) else 32


def _fits(group: int, columns: int) -> bool:
    """Can kernels step through such groups?"""
    return group % 16 == 0 and (group in (16, 32) or group % 64 == 0 or group % 32 == 0 or group >= columns)


def _parts(tensor: RawTensor) -> Iterator[tuple[int, RawTensor]]:
    """(first row, rows) of a matrix, some at a time; of one that is made when it is wanted, what was made."""
    rows, columns = tensor.shape
    step = max(ROWS_AT_ONCE // max(columns, 1), 1)
    for begin in range(0, rows, step):
        whole = rows <= step and isinstance(tensor, FileTensor)
        yield begin, tensor if whole else tensor.take_rows(np.arange(begin, min(begin + step, rows)))


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def _unpacked(tensor: RawTensor, how: str | Layout, device: Device, *, rounded: bool = False) -> Matrix:
    """Part by part into the place where it stays."""
    rows, columns = tensor.shape
    whole: dict[str, Tensor] = {}
    with said(f"the weight {tensor.name}"):
        for begin, part in _parts(tensor):
            assert isinstance(part, FileTensor)
            raw = _quantize(part, str(how)) if rounded else part.data
            form = BLOCKS[how](raw, columns) if isinstance(how, str) else of_layout(how, raw, columns)
            for name in ("codes", "scales", "offsets"):
                if (array := getattr(form, name)) is None:
                    continue
                values = _tensor(array)
                if name not in whole:
                    whole[name] = torch.empty((rows, *values.shape[1:]), dtype=values.dtype, device=device.place)
                whole[name][begin : begin + len(values)] = values
    levels = None if form.levels is None else _tensor(form.levels).to(device.place)
    kind = FLOAT8 if form.float8 else LEVELS if levels is not None else NIBBLES if form.packed else PLAIN
    return Matrix(kind, rows, columns, group=form.group, zero=form.zero, levels=levels, wide=form.wide, **whole)


def _quantize(part: RawTensor, name: str) -> NDArray[np.uint8]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    values = np.ascontiguousarray(part.float32())
    return np.asarray(quantize(values, GGMLQuantizationType[name]), np.uint8)


def of_layout(layout: Layout, raw: NDArray[np.uint8], columns: int) -> Unpacked:
    """Rows of a type of formats.grouped: AWQ, GPTQ, FP8, MXFP4, NVFP4, bitsandbytes, ..."""
    codes, scales, points = split(layout, raw, e4m3_table())
    codes = np.ascontiguousarray(codes).reshape(len(raw), -1)
    packed = layout.code_bytes < layout.group
    codes = codes[:, : -(-columns // 2) if packed else columns]
    if layout.codes == "I8":
        codes = (codes.astype(np.int16) - 128).astype(np.int8)
    return Unpacked(
        codes=codes,
        group=layout.group,
        scales=scales,
        offsets=None if points is None else -points.astype(np.float32) * scales,
        packed=packed,
        levels=LEVEL_LISTS.get(layout.codes),
        float8=layout.codes == "E4M3",
        wide=layout.codes in ("NF4", "FP4"),
    )


def plain(values: NDArray[np.float32], device: Device, name: str = "made") -> Matrix:
    """A float32 matrix of these values."""
    raw = np.ascontiguousarray(values, np.float32)
    return to_device(make_tensor(name, raw.shape, "F32", raw.reshape(-1).view(np.uint8)), device)
