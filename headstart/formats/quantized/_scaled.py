"""Weights that are codes times scales: one scale per tensor, per row, or per block of rows and columns."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.formats.quantization import Decode, Shape, Stored

BLOCK = 128
Codes = Callable[[Tensor], NDArray[np.float32]]  # rows of the stored tensor -> values of their codes [n, columns]


def scaled(stored: Stored, shape: Shape, codes: Codes, block: tuple[int, int] | None = None) -> Decode:
    """A function that reads values float32(code) * float32(scale) of a weight [..., rows, columns]. `block`: rows and
    columns that share a scale; None: by the scales' shape. Raises ModelError if scales and weight do not fit."""
    block = block or block_of(stored, shape)
    folded = stored.main.as_matrix()
    scales_of = scale_rows(stored, shape, block)

    def decode(chosen: NDArray[np.int64]) -> NDArray[np.float32]:
        own = np.repeat(scales_of(chosen), block[1], axis=1)[:, : shape[-1]]
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(codes(folded.take_rows(chosen)) * own)

    return decode


def scale_rows(stored: Stored, shape: Shape, block: tuple[int, int]) -> Decode:
    """A function from row indices [n] of a weight to the scales of their blocks [n, blocks of a row]. Raises ModelError
    for scales that are not finite or have another shape."""
    scale, (rows, columns) = stored.scale, shape[-2:]
    assert scale is not None
    count = -(-rows // block[0]) * -(-columns // block[1])
    if math.prod(scale.shape) not in (count, count * math.prod(shape[:-2])):
        raise _misfit(stored, scale, block)
    numbers(scale, stored)
    per_matrix = -(-rows // block[0])
    grid = _floats(scale).shaped(math.prod(scale.shape) // -(-columns // block[1]), -(-columns // block[1]))
    stack = grid.shape[0] // per_matrix
    return lambda chosen: grid.take_rows(
        chosen // rows % stack * per_matrix + chosen % rows // block[0]
    ).float32()  # not kept: as float32 they may be an eighth of the file


def _floats(scale: Tensor) -> Tensor:
    return replace(scale, dtype="F8_E8M0") if scale.dtype == "U8" else scale


def group_in(width: int, columns: int) -> int:
    """The largest group of columns of the kernels (64, 32 or 16) that divides a block of `width` columns; else 0."""
    return next((group for group in (64, 32, 16) if width % group == 0 or width >= columns), 0)


def numbers(scale: Tensor, stored: Stored) -> NDArray[np.float32]:
    """The values of a weight's scales, float32 [*shape]; U8 is read as E8M0. Raises ModelError if one is not finite."""
    values = _floats(scale).float32()
    if not np.isfinite(values).all():
        raise ModelError(f"the scales {scale.name} of {stored.name} are not all numbers", "download the model again")
    return values


def not_a_scale(scale: Tensor, stored: Stored) -> ModelError:
    """The error for a tensor that is neither a scale for the whole weight nor one for each matrix of a stack."""
    return ModelError(f"{scale.name} {list(scale.shape)} is not a scale for {stored.name} {list(stored.main.shape)}")


def block_of(stored: Stored, shape: Shape) -> tuple[int, int]:
    """The number of rows and of columns that share one scale. Raises ModelError if scales and weight do not fit."""
    scale = stored.scale
    assert scale is not None
    if not scale.dtype.startswith(("F", "BF")) and (scale.dtype != "U8" or not stored.main.dtype.startswith("F8_E")):
        raise ModelError(f"the scales {scale.name} are {scale.dtype}, which is not a floating-point type")
    grid = scale.shape
    if len(shape) < 2:
        raise ModelError(f"{stored.name} has scales, but is not a matrix: its shape is {list(shape)}")
    if math.prod(grid) == 1:
        return shape[-2], shape[-1]
    if grid == shape[:-1]:
        return 1, shape[-1]
    if len(grid) != len(shape) or grid[:-2] != shape[:-2] or 0 in grid:
        raise _misfit(stored, scale)
    sizes = _declared(stored) or tuple(map(_size, shape[-2:], grid[-2:]))
    fits = tuple(-(-size // each) for size, each in zip(shape[-2:], sizes, strict=True)) == grid[-2:]
    if not fits and grid[:-1] == shape[:-1] and shape[-1] % grid[-1] == 0:  # of rows, although the config has blocks
        return 1, shape[-1] // grid[-1]
    if not fits:
        raise _misfit(stored, scale, sizes)
    return sizes[0], sizes[1]


def _declared(stored: Stored) -> tuple[int, ...] | None:
    """Block size of the config; 128 x 128 without one if scales have DeepSeek's name, else None."""
    match stored.settings.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    return (BLOCK, BLOCK) if any(word.endswith("_scale_inv") for word in stored.auxiliary) else None


def _size(size: int, count: int) -> int:
    """Block size along a dimension of `size` with `count` scales: 128 if that fits, else an even division."""
    return BLOCK if -(-size // BLOCK) == count else -(-size // count)


def _misfit(stored: Stored, scale: Tensor, sizes: tuple[int, ...] | None = None) -> ModelError:
    of = f" of {sizes[0]} x {sizes[1]}" if sizes else ""
    return ModelError(
        f"the scales {scale.name} {list(scale.shape)} do not fit the blocks{of} of {stored.name} "
        f"{list(stored.main.shape)}",
        "quantization_config.weight_block_size and the tensors must agree",
    )
