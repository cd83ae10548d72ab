"""Quantized tensors turned back into bfloat16, a slab of rows at a time, with numpy alone.

A weight is quantized if a tensor of scales stands beside it. The value is float32(code) * float32(scale), rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Tensor, make_tensor
from headstart.formats.safetensors import Planned, bfloat16, copied

SLAB_VALUES = 1 << 20
SCALE_ENDINGS = ("_scale_inv", "_scale")
"""Of the scales of a tensor: its own name with one of these; or `.scale` in the place of `.weight`."""
PASSED_OVER = (".input_scale", ".output_scale", ".activation_scale")
"""Static scales of activations: of no use once the weights are plain."""
PACKED = (
    "qweight", "qzeros", "g_idx", "scales", "weight_packed", "weight_scale_2", "weight_global_scale",
    "weight_zero_point", "absmax", "quant_map", "SCB", "codebooks",
)  # fmt: skip
"""Last parts of names that belong to packings (GPTQ, AWQ, NVFP4, bitsandbytes, AQLM) that are not turned back here."""
CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8")
"""Types that mean nothing without scales."""
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The sixteen values of FP4 E2M1."""
FLOAT4_GROUP = 32
AGAIN = "is a shard missing? download the model again"


@dataclass(frozen=True)
class Quantized:
    """A weight with its scales. `rows`, `columns`: how many of the weight's share one scale."""

    weight: Tensor
    scale: Tensor
    rows: int
    columns: int
    packed: bool = False  # two FP4 codes in a byte, the even column in the low half

    @property
    def shape(self) -> tuple[int, ...]:
        *leading, last = self.weight.shape
        return (*leading, 2 * last if self.packed else last)


def scale_of(name: str, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """The scales that stand beside a tensor."""
    names = [name + ending for ending in SCALE_ENDINGS]
    if name.endswith(".weight"):
        names.append(f"{name.removesuffix('.weight')}.scale")
    return next((tensors[each] for each in names if each in tensors), None)


def is_scale(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Does a tensor scale a weight? Not each that is called so: others belong to the model's own formula."""
    if name.endswith((".weight_scale_inv", ".weight_scale", ".scale")):
        return True
    return any(name.endswith(each) and name.removesuffix(each) in tensors for each in SCALE_ENDINGS)


def pair(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Quantized:
    """How a weight and its scales go together. `block`: what the config says. ModelError where they do not."""
    shape, grid = weight.shape, scale.shape
    if weight.dtype in ("I8", "U8") and len(shape) == 2 and grid == (shape[0], 2 * shape[1] // FLOAT4_GROUP):
        return Quantized(weight, scale, 1, FLOAT4_GROUP, packed=True)
    if weight.dtype not in ("F8_E4M3", "F8_E5M2", "I8"):
        raise ModelError(f"{weight.name} is {weight.dtype}, but scales {scale.name} stand beside it", "which is right?")
    if len(shape) < 2:
        raise ModelError(f"{weight.name} has scales, but is no matrix: its shape is {list(shape)}")
    if math.prod(grid) == 1:
        return Quantized(weight, scale, math.prod(shape[:-1]), shape[-1])
    if grid == shape[:-1]:
        return Quantized(weight, scale, 1, shape[-1])
    if len(grid) != len(shape) or grid[:-2] != shape[:-2] or 0 in grid:
        raise _misfit(weight, scale)
    sizes = block or (_block(shape[-2], grid[-2]), _block(shape[-1], grid[-1]))
    if tuple(-(-size // each) for size, each in zip(shape[-2:], sizes, strict=True)) != grid[-2:]:
        raise _misfit(weight, scale, sizes)
    return Quantized(weight, scale, *sizes)


def _block(size: int, count: int) -> int:
    """The usual 128 where it fits, else an even division."""
    return 128 if -(-size // 128) == count else -(-size // count)


def _misfit(weight: Tensor, scale: Tensor, sizes: tuple[int, int] | None = None) -> ModelError:
    of = f" of {sizes[0]} x {sizes[1]}" if sizes else ""
    return ModelError(
        f"the scales {scale.name} {list(scale.shape)} do not fit the blocks{of} of {weight.name} {list(weight.shape)}",
        "quantization_config.weight_block_size and the tensors must agree",
    )


@dataclass(frozen=True)
class Plain:
    """Tensors with nothing quantized left. `converted`: names of those that were; `scales`: what scaled them."""

    planned: list[Planned]
    converted: list[str]
    scales: set[str]
    notes: list[str]


def make_plain(
    names: Mapping[str, str], tensors: Mapping[str, Tensor], block: tuple[int, int] | None, described: bool = False
) -> Plain:
    """Plan tensors (name -> new name), quantized ones turned back. `described`: another file says how integers are to
    be read, so that their scales stay. ModelError for packings, for codes without scales and scales without codes."""
    if packed := next((name for name in names if name.rpartition(".")[2] in PACKED), None):
        raise ModelError(f"{packed} belongs to a packing that is not turned back here", "take the unquantized model")
    plain = Plain([], [], set(), [])
    for name, new in names.items():
        scale = scale_of(name, tensors)
        if scale is not None and (not described or scale.name.endswith("_scale_inv")):
            plain.planned.append(planned(new, pair(tensors[name], scale, block)))
            plain.converted.append(name)
            plain.scales.add(scale.name)
        elif described or not (is_scale(name, tensors) or name.endswith(PASSED_OVER)):
            plain.planned.append(copied(new, tensors[name]))
    if not described:
        _check_left(names, tensors, plain)
    return plain


def _check_left(names: Mapping[str, str], tensors: Mapping[str, Tensor], plain: Plain) -> None:
    for name in names:
        scales = is_scale(name, tensors)
        if scales and name not in plain.scales:
            raise ModelError(f"{name} scales a weight that is not there", AGAIN)
        if not scales and tensors[name].dtype in CODES and name not in plain.converted:
            raise ModelError(f"{name} is {tensors[name].dtype}, but no scales stand beside it", AGAIN)
    if dropped := [name for name in names if name.endswith(PASSED_OVER)]:
        plain.notes.append(f"{len(dropped)} scales of activations were left out")


def planned(name: str, quantized: Quantized) -> Planned:
    """The plain tensor, in bfloat16."""
    return Planned(name, "BF16", quantized.shape, lambda: _slabs(quantized))


def _slabs(quantized: Quantized) -> Iterator[NDArray[Any]]:
    weight, shape = quantized.weight, quantized.shape
    scales = _values(quantized.scale, 0, quantized.scale.nbytes, quantized.scale.shape)
    rows, columns = shape[-2:] if len(shape) > 2 else (math.prod(shape[:-1]), shape[-1])
    stored_row = weight.nbytes // math.prod(shape[:-1])
    grid = scales.reshape(-1, -(-rows // quantized.rows), max(1, -(-columns // quantized.columns)))
    step = max(1, SLAB_VALUES // columns)
    for matrix in range(math.prod(shape[:-2])):
        of = grid[matrix % len(grid)]
        for begin in range(0, rows, step):
            count = min(step, rows - begin)
            at = (matrix * rows + begin) * stored_row
            codes = _codes(quantized, at, count * stored_row, count)
            own = of[np.arange(begin, begin + count) // quantized.rows]
            with np.errstate(over="ignore", invalid="ignore"):
                values = codes * np.repeat(own, quantized.columns, axis=1)[:, :columns]
            yield round_bfloat16(values)


def _codes(quantized: Quantized, begin: int, nbytes: int, rows: int) -> NDArray[np.float32]:
    weight = quantized.weight
    if quantized.packed:
        raw = weight.read_bytes(begin, nbytes).reshape(rows, -1)
        return np.stack((FLOAT4[raw & 15], FLOAT4[raw >> 4]), axis=-1).reshape(rows, -1)
    if weight.dtype == "I8":
        return weight.read_bytes(begin, nbytes).view(np.int8).reshape(rows, -1).astype(np.float32)
    return _values(weight, begin, nbytes, (rows, weight.shape[-1]))


def _values(stored: Tensor, begin: int, nbytes: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return make_tensor(stored.name, shape, stored.dtype, stored.read_bytes(begin, nbytes)).float32()


def round_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Nearest, ties to even; every NaN becomes the positive quiet one, as in torch."""
    return np.where(np.isnan(values), np.uint16(0x7FC0), bfloat16(values)[0])
