"""Weights on the device: numbers in about their file's own size, with the scales of groups; no value is changed.

Shapes: N rows, K columns, U groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.config import Quantization
from headstart.core import Bytes
from headstart.formats.base import Tensor as FileTensor, e4m3_table
from headstart.formats.grouped import LEVELS as LEVEL_LISTS, Layout, layout_of, split
from headstart.kernels.cuda.device import CudaDevice, explain_out_of_memory
from headstart.kernels.ops import RawTensor


@dataclass(frozen=True)
class Unpacked:
    """Rows of a quantized matrix: value = (code - zero) * scale + offset, by groups of columns.

    GGUF layouts: ggml-common.h of llama.cpp. Products of two scales are exact in float32, so values equal the
    file's."""

    codes: Any  # [n, K], or [n, K / 2] if packed
    group: int  # columns of a group
    scales: Any  # [n, U]
    offsets: Any = None  # [n, U]
    zero: int = 0
    packed: bool = False  # two 4-bit codes per byte
    levels: Any = None  # [16] float32: codes are indices into it
    float8: bool = False  # codes are E4M3
    wide: bool = False  # bfloat16 cannot hold the codes or levels exactly


def _half(raw: Bytes) -> NDArray[np.float32]:
    """float16 [..., 2 n bytes] -> float32 [..., n]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _blocks(raw: Bytes, size: int) -> Bytes:
    """Bytes [n, bytes of a row] -> [n, blocks, size]."""
    return raw.reshape(len(raw), -1, size)


def _nibbles(raw: Bytes) -> Bytes:
    """Bytes [..., n] -> their low nibbles, then their high nibbles, [..., 2 n]."""
    return np.asarray(np.concatenate((raw & 15, raw >> 4), axis=-1), np.uint8)


def _pack_nibbles(codes: Bytes) -> Bytes:
    """4-bit codes [n, ...] -> two per byte [n, K / 2]."""
    flat = codes.reshape(len(codes), -1)
    return np.asarray(flat[:, ::2] | (flat[:, 1::2] << 4), np.uint8)


def _flat(values: NDArray[Any]) -> NDArray[Any]:
    return values.reshape(len(values), -1)


def _bit_planes(raw: Bytes, count: int) -> Bytes:
    """The lowest `count` bits of each byte, [..., n] -> [..., count * n]: all first bits, then all second bits, ..."""
    return np.asarray(np.concatenate([(raw >> i) & 1 for i in range(count)], axis=-1), np.uint8)


def q4_0(raw: Bytes) -> Unpacked:
    blocks = _blocks(raw, 18)
    codes = _pack_nibbles(_nibbles(blocks[..., 2:]))
    return Unpacked(codes, 32, _flat(_half(blocks[..., :2])), zero=8, packed=True)


def q4_1(raw: Bytes) -> Unpacked:
    blocks = _blocks(raw, 20)
    codes = _pack_nibbles(_nibbles(blocks[..., 4:]))
    return Unpacked(codes, 32, _flat(_half(blocks[..., :2])), _flat(_half(blocks[..., 2:4])), packed=True)


def _fifth_bits(bits: Bytes) -> Bytes:
    """32 bits [..., 4] -> 16 where the bit is set, [..., 32]."""
    return np.asarray(np.unpackbits(np.ascontiguousarray(bits), axis=-1, bitorder="little") << 4, np.uint8)


def q5_0(raw: Bytes) -> Unpacked:
    blocks = _blocks(raw, 22)
    codes = (_nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6])).astype(np.int8) - np.int8(16)
    return Unpacked(_flat(codes), 32, _flat(_half(blocks[..., :2])))


def q5_1(raw: Bytes) -> Unpacked:
    blocks = _blocks(raw, 24)
    codes = _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8])
    return Unpacked(_flat(codes), 32, _flat(_half(blocks[..., :2])), _flat(_half(blocks[..., 2:4])))


def q8_0(raw: Bytes) -> Unpacked:
    blocks = _blocks(raw, 34)
    return Unpacked(_flat(blocks[..., 2:].view(np.int8)), 32, _flat(_half(blocks[..., :2])))


def _six_bit_scales(raw: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes [..., 12]."""
    first, second, high = raw[..., :4], raw[..., 4:8], raw[..., 8:]
    scales = np.concatenate((first & 63, (high & 15) | (first >> 6) << 4), axis=-1)
    lows = np.concatenate((second & 63, (high >> 4) | (second >> 6) << 4), axis=-1)
    return scales.astype(np.float32), lows.astype(np.float32)


def _block_scales(blocks: Bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    """Scales and offsets [n, U] of K-quant blocks that begin with d, dmin and 12 bytes of scales."""
    scales, lows = _six_bit_scales(blocks[..., 4:16])
    return _flat(_half(blocks[..., :2]) * scales), _flat(-_half(blocks[..., 2:4]) * lows)


def q4_k(raw: Bytes) -> Unpacked:
    blocks = _blocks(raw, 144)
    codes = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32))
    return Unpacked(_pack_nibbles(_flat(codes)), 32, *_block_scales(blocks), packed=True)


def q5_k(raw: Bytes) -> Unpacked:
    blocks = _blocks(raw, 176)
    low = _nibbles(blocks[..., 48:].reshape(*blocks.shape[:2], 4, 32)).reshape(*blocks.shape[:2], -1)
    return Unpacked(_flat(low | _bit_planes(blocks[..., 16:48], 8) << 4), 32, *_block_scales(blocks))


def q6_k(raw: Bytes) -> Unpacked:
    blocks = _blocks(raw, 210)
    shape = (*blocks.shape[:2], 2, -1)  # two halves of 128 weights each
    low, high = blocks[..., :128].reshape(shape), blocks[..., 128:192].reshape(shape)
    upper = np.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], axis=-1) << 4
    codes = (_nibbles(low) | upper).astype(np.int8) - np.int8(32)
    scales = _half(blocks[..., 208:]) * blocks[..., 192:208].view(np.int8).astype(np.float32)
    return Unpacked(_flat(codes), 16, _flat(scales))


BLOCKS: Mapping[str, Callable[[Bytes], Unpacked]] = {
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
}  # fmt: skip
"""GGUF types that keep about their own size; other types become floats."""


PLAIN, NIBBLES, FLOAT8, LEVELS = range(4)  # how codes are stored (see kernels/products.py)
ROWS_AT_ONCE = 16 << 20  # elements unpacked at a time, so that a large table is not in memory twice
_PLAIN = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_NUMPY = {"BF16": np.int16, "F16": np.float16, "F32": np.float32}
_QUANTIZED = {"int8": "Q8_0", "int4": "Q4_1"}
_BITS = {"int8": 9, "int4": 5}


@dataclass(frozen=True, eq=False)
class CudaMatrix:
    """A weight [rows, columns] on the device: (code - zero) * scale + offset, by groups of columns."""

    kind: int  # PLAIN, NIBBLES, FLOAT8 or LEVELS
    rows: int
    columns: int
    codes: Tensor  # [N, K], or [N, K / 2] with two per byte, even columns in the low nibble
    group: int = 0  # columns of a group; 0: codes are the values
    zero: int = 0
    scales: Tensor | None = None  # [N, U]
    offsets: Tensor | None = None  # [N, U]
    levels: Tensor | None = None  # [16] float32
    wide: bool = False  # bfloat16 cannot hold the codes or levels exactly

    @property
    def units(self) -> int:
        """Groups of a row."""
        return -(-self.columns // self.group) if self.group else 0

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.offsets) if t is not None)


def load_matrix(tensor: RawTensor, device: CudaDevice, quantization: Quantization | None = None) -> CudaMatrix:
    """Copy a file's matrix to the device. `quantization` rounds weights with more bits, in groups of 32. Raises
    ModelError if memory runs out."""
    rows, columns = tensor.shape
    if quantization and columns % 32 == 0 and _bits_per_weight(tensor) > _BITS[quantization]:
        return _unpacked(tensor, _QUANTIZED[quantization], device, rounded=True)
    if tensor.dtype in BLOCKS:
        return _unpacked(tensor, tensor.dtype, device)
    layout = layout_of(tensor.dtype)
    if layout is not None and _fits(layout.group, columns):
        return _unpacked(tensor, layout, device)
    kept = tensor.dtype if tensor.dtype in _PLAIN else "F32"
    with explain_out_of_memory(f"the weight {tensor.name}"):
        codes = torch.empty((rows, columns), dtype=_PLAIN[kept], device=device.torch_device)
    for begin, part in _parts(tensor):
        values: NDArray[Any] = part.float32()  # a view if the tensor is float32
        if isinstance(part, FileTensor) and part.dtype == kept != "F32":
            values = part.data.reshape(-1).view(_NUMPY[kept])
        codes[begin : begin + part.shape[0]] = _tensor(values.reshape(part.shape)).view(_PLAIN[kept])
    return CudaMatrix(PLAIN, rows, columns, codes, wide=kept != "BF16")


def _bits_per_weight(tensor: RawTensor) -> float:
    """Bits of one weight in the file."""
    return 8 * tensor.nbytes / (tensor.shape[0] * tensor.shape[1]) if isinstance(tensor, FileTensor) else 32


def _fits(group: int, columns: int) -> bool:
    """True if kernels can step over groups of this size."""
    return group % 32 == 0 or group == 16 or (group % 16 == 0 and group >= columns)


def _parts(tensor: RawTensor) -> Iterator[tuple[int, RawTensor]]:
    """(first row, rows) of a matrix, about ROWS_AT_ONCE elements at a time; lazy tensors are evaluated."""
    rows, columns = tensor.shape
    step = max(ROWS_AT_ONCE // max(columns, 1), 1)
    for begin in range(0, rows, step):
        whole = rows <= step and isinstance(tensor, FileTensor)
        yield begin, tensor if whole else tensor.take_rows(np.arange(begin, min(begin + step, rows)))


def _tensor(values: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def _unpacked(tensor: RawTensor, how: str | Layout, device: CudaDevice, *, rounded: bool = False) -> CudaMatrix:
    """Unpack a matrix part by part into device memory."""
    rows, columns = tensor.shape
    whole: dict[str, Tensor] = {}
    with explain_out_of_memory(f"the weight {tensor.name}"):
        for begin, part in _parts(tensor):
            assert isinstance(part, FileTensor)
            raw = _quantize(part, str(how)) if rounded else part.data
            form = BLOCKS[how](raw) if isinstance(how, str) else unpack_layout(how, raw, columns)
            for name in ("codes", "scales", "offsets"):
                if (array := getattr(form, name)) is None:
                    continue
                values = _tensor(array)
                if name not in whole:
                    whole[name] = torch.empty((rows, *values.shape[1:]), dtype=values.dtype, device=device.torch_device)
                whole[name][begin : begin + len(values)] = values
    levels = None if form.levels is None else _tensor(form.levels).to(device.torch_device)
    kind = FLOAT8 if form.float8 else LEVELS if levels is not None else NIBBLES if form.packed else PLAIN
    return CudaMatrix(kind, rows, columns, group=form.group, zero=form.zero, levels=levels, wide=form.wide, **whole)


def _quantize(part: RawTensor, name: str) -> NDArray[np.uint8]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    values = np.ascontiguousarray(part.float32())
    return np.asarray(quantize(values, GGMLQuantizationType[name]), np.uint8)


def unpack_layout(layout: Layout, raw: NDArray[np.uint8], columns: int) -> Unpacked:
    """Unpack rows of a formats.grouped layout: AWQ, GPTQ, FP8, MXFP4, NVFP4, bitsandbytes, ..."""
    codes, scales, points = split(layout, raw, e4m3_table())
    codes = np.ascontiguousarray(codes).reshape(len(raw), -1)
    packed = layout.code_bytes < layout.group
    codes = codes[:, : -(-columns // 2) if packed else columns]
    if layout.codes == "I8":
        codes = (codes.astype(np.int16) - 128).astype(np.int8)
    return Unpacked(
        codes=codes, group=layout.group, scales=scales,
        offsets=None if points is None else -points.astype(np.float32) * scales, packed=packed,
        levels=LEVEL_LISTS.get(layout.codes), float8=layout.codes == "E4M3", wide=layout.codes in ("NF4", "FP4"),
    )  # fmt: skip
