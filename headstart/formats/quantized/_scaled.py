"""Codes times scales: one for a tensor, for each row, or for each block of rows and columns."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.formats.quantization import Decode, Shape, Stored

BLOCK = 128
Codes = Callable[[Tensor], NDArray[np.float32]]
"""Rows of the stored tensor -> codes [n, columns]."""


def scaled(stored: Stored, shape: Shape, codes: Codes, block: tuple[int, int] | None = None) -> Decode:
    """The values of a weight [..., rows, columns]: float32(code) * float32(scale). `block`: rows and columns that share
    a scale; None: as the scales' shape says. ModelError where scales and weight do not fit."""
    scale = stored.scale
    assert scale is not None
    block = block or block_of(stored, shape)
    rows, columns = shape[-2:]
    folded = stored.main.shaped(math.prod(shape[:-1]), stored.main.shape[-1])
    grid = scale.float32().reshape(-1, -(-rows // block[0]), -(-columns // block[1]))

    def decode(chosen: NDArray[np.int64]) -> NDArray[np.float32]:
        own = grid[chosen // rows % len(grid), chosen % rows // block[0]]
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(codes(folded.take_rows(chosen)) * np.repeat(own, block[1], axis=1)[:, :columns])

    return decode


def block_of(stored: Stored, shape: Shape) -> tuple[int, int]:
    """Rows and columns of the weight that share one scale. ModelError where scales and weight do not fit."""
    scale = stored.scale
    assert scale is not None
    if not scale.dtype.startswith(("F", "BF")):
        raise ModelError(f"the scales {scale.name} are {scale.dtype}, which is no floating-point type")
    grid = scale.shape
    if len(shape) < 2:
        raise ModelError(f"{stored.name} has scales, but is no matrix: its shape is {list(shape)}")
    if math.prod(grid) == 1:
        return shape[-2], shape[-1]
    if grid == shape[:-1]:
        return 1, shape[-1]
    if len(grid) != len(shape) or grid[:-2] != shape[:-2] or 0 in grid:
        raise _misfit(stored, scale)
    sizes = _declared(stored) or tuple(map(_size, shape[-2:], grid[-2:]))
    fits = tuple(-(-size // each) for size, each in zip(shape[-2:], sizes, strict=True)) == grid[-2:]
    if not fits and grid == (*shape[:-1], 1):  # one for each row, whatever the config says of blocks
        return 1, shape[-1]
    if not fits:
        raise _misfit(stored, scale, sizes)
    return sizes[0], sizes[1]


def _declared(stored: Stored) -> tuple[int, ...] | None:
    """What the config says; 128 x 128 where it does not and the scales are called as in DeepSeek's files."""
    match stored.settings.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return (BLOCK, BLOCK) if any(word.endswith("_scale_inv") for word in stored.beside) else None


def _size(size: int, count: int) -> int:
    """The usual 128 where it fits, else an even division."""
    return BLOCK if -(-size // BLOCK) == count else -(-size // count)


def _misfit(stored: Stored, scale: Tensor, sizes: tuple[int, ...] | None = None) -> ModelError:
    of = f" of {sizes[0]} x {sizes[1]}" if sizes else ""
    return ModelError(
        f"the scales {scale.name} {list(scale.shape)} do not fit the blocks{of} of {stored.name} "
        f"{list(stored.main.shape)}",
        "quantization_config.weight_block_size and the tensors must agree",
    )
