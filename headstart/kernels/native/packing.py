"""A file's weights -> the native kernels' blocks (csrc/matrix.h), by all threads of a pool. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headstart.formats.base import Bytes, Tensor
from headstart.kernels.native._native import Matrix, ThreadPool, dequantize_into, matrix_bytes, pack_rows, source_form
from headstart.kernels.ops import RawTensor

Quantization = Literal["int8", "int4"]

_ALIGN = 64
_FLOATS_AT_ONCE = 4 << 20
_BITS = {0: 32, 1: 16, 2: 16, 3: 8, 4: 4, 5: 9, 6: 4, 7: 6}
"""Kind of a matrix -> bits of one weight, without its scales. FP8 counts as more than int8, which is faster."""
_BITS_OF: Mapping[Quantization, int] = {"int8": 8, "int4": 4}


def pack(tensor: RawTensor, pool: ThreadPool, quantization: Quantization | None = None) -> Matrix:
    """The weight [rows, cols] as the kernels read it, in the file's own precision: every value stays the same.

    `quantization` rounds to groups of 32 with a float16 scale (int8) or scale and minimum (int4); a tensor which the
    file's own precision packs into no more bits is left as it is. Types that the kernels lack become float32.
    """
    if len(tensor.shape) != 2:
        raise ValueError(f"tensor {tensor.name} has the shape {list(tensor.shape)}, but a matrix is wanted")
    rows, cols = tensor.shape
    source = _source(tensor, quantization)
    form = source_form(source)
    assert form is not None, source
    kind, group, zero, scales, offsets, levels = form
    out = aligned_empty(matrix_bytes(kind, rows, cols, group, scales, offsets))
    if isinstance(tensor, Tensor) and source == tensor.dtype:
        pack_rows(pool, source, tensor.data, cols, out)
    else:
        _pack_parts(tensor, pool, source, out)
    return Matrix(kind, rows, cols, group, zero, scales, offsets, out, levels)


def dequantize(matrix: Matrix, pool: ThreadPool) -> NDArray[np.float32]:
    """The values of a packed matrix, [rows, cols]."""
    out = np.empty((matrix.rows, matrix.cols), np.float32)
    dequantize_into(pool, matrix, out)
    return out


def aligned_empty(size: int) -> Bytes:
    """uint8 [size], not initialized, on a 64-byte boundary."""
    raw = np.empty(size + _ALIGN, np.uint8)
    begin = -raw.ctypes.data % _ALIGN
    return raw[begin : begin + size]


def _source(tensor: RawTensor, quantization: Quantization | None) -> str:
    """What the rows are packed from: the tensor's own type, or float32 rows that stay ("F32") or are quantized."""
    own = source_form(tensor.dtype)
    if quantization and (own is None or _BITS[own[0]] > _BITS_OF[quantization]):
        return quantization
    return "F32" if own is None else tensor.dtype


def _pack_parts(tensor: RawTensor, pool: ThreadPool, source: str, out: Bytes) -> None:
    """What is not in the file as it is packed, some rows at a time: a large table need not fit into memory twice."""
    rows, cols = tensor.shape
    step = max(_FLOATS_AT_ONCE // cols // 16, 1) * 16  # blocks of the layout have 16 rows
    block_bytes = out.size // -(-rows // 16)
    for begin in range(0, rows, step):
        chosen = np.arange(begin, min(begin + step, rows))
        part = tensor if isinstance(tensor, Tensor) and step >= rows else tensor.take_rows(chosen)
        if isinstance(part, Tensor) and part.dtype == source:
            data = part.data
        else:
            data = np.ascontiguousarray(part.float32()).view(np.uint8)
        blocks = out[begin // 16 * block_bytes :][: -(-len(chosen) // 16) * block_bytes]
        pack_rows(pool, source, data, cols, blocks)
