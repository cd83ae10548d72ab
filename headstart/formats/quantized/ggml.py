"""GGUF's NVFP4 and Q1_0, repacked into types of the same values that kernels support.

NVFP4: a block has four unsigned FP8 scales for 64 columns, then the codes of 16 columns each; a byte has columns i and
8 + i. A further tensor may have a scale for the tensor, or for each matrix of a stack (`formats/quantized/nvfp4.py`).
Q1_0: a float16 scale for 128 columns and a sign bit for each; both signs are among Q4_0's sixteen levels.
"""

import math

import numpy as np
from numpy.typing import NDArray

from headstart.formats.base import Tensor
from headstart.formats.grouped import Layout, joined
from headstart.formats.quantization import Described, Quantization, Repacked, Stored
from headstart.formats.quantized._scaled import not_a_scale, numbers

NVFP4_BYTES, Q1_0_BYTES = 36, 18  # of a block
NO_NUMBER = 0x7F  # NaN as an FP8 scale


def check(stored: Stored) -> None:
    scale, stack = stored.scale, math.prod(stored.main.shape[:-2])
    if scale is not None and (stored.main.dtype != "NVFP4" or math.prod(scale.shape) not in (1, stack)):
        raise not_a_scale(scale, stored)


def keep(stored: Stored) -> Repacked:
    check(stored)
    return _one_bit(stored.main.as_matrix()) if stored.main.dtype == "Q1_0" else _nvfp4(stored)


def _nvfp4(stored: Stored) -> Repacked:
    layout, matrix, num_rows = Layout("E2M1", 16, "E4M3"), stored.main.as_matrix(), math.prod(stored.main.shape[-2:-1])

    def rows(chosen: NDArray[np.int64]) -> NDArray[np.uint8]:
        factors = np.ones(1, np.float32) if stored.scale is None else numbers(stored.scale, stored).reshape(-1)
        blocks = matrix.take_rows(chosen).data.reshape(len(chosen), -1, NVFP4_BYTES)
        halves = blocks[..., 4:].reshape(len(chosen), -1, 8)
        codes = np.concatenate((halves & 15, halves >> 4), axis=-1).reshape(len(chosen), -1)
        scales = blocks[..., :4].reshape(len(chosen), -1)
        scales = np.where(scales == NO_NUMBER, 0, scales)  # llama.cpp reads 0x7F as 0
        own = factors[chosen // num_rows % len(factors)]
        return joined(layout, codes[:, ::2] | codes[:, 1::2] << 4, scales, factors=own)

    return Repacked(layout.name, rows)


def _one_bit(matrix: Tensor) -> Repacked:
    def rows(chosen: NDArray[np.int64]) -> NDArray[np.uint8]:
        blocks = matrix.take_rows(chosen).data.reshape(len(chosen), -1, 1, Q1_0_BYTES)
        steps = 7 + 2 * np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little").reshape(len(chosen), -1, 4, 32)
        scales = np.repeat(blocks[..., :2], 4, axis=-2)
        halves = np.concatenate((scales, steps[..., :16] | steps[..., 16:] << 4), axis=-1)
        return np.ascontiguousarray(halves).reshape(len(chosen), -1)

    return Repacked("Q4_0", rows)


QUANTIZATION = Quantization(
    describe=lambda stored: Described(stored.main.shape, stored.main.dtype),
    types=("NVFP4", "Q1_0"),
    auxiliary=("scale",),
    check=check,
    keep=keep,
    bits=4,
)
