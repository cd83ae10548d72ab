"""8-bit integers (compressed-tensors' int-quantized) with a scale per tensor, row, group or block.

Value: (code - zero point) * scale.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.formats.integers import Integers
from headstart.formats.quantization import Decode, Described, Quantization, Stored, WeightBytes
from headstart.formats.quantized._four_bits import group_of
from headstart.formats.quantized._scaled import block_of, scale_rows, scaled

GROUP = 64


def describe(stored: Stored) -> Described | None:
    signs = {"SCB", "_scales"} | {word for word in stored.auxiliary if "absmax" in word}
    if stored.packed or stored.main.dtype not in ("I8", "U8") or signs & stored.auxiliary.keys():
        return None
    return None if group_of(stored) or not stored.scale else Described(stored.main.shape, "int8")


def codes(stored: Tensor) -> NDArray[np.float32]:
    return stored.data.view(np.int8).astype(np.float32)


def decode(stored: Stored) -> Decode | None:
    if stored.main.dtype != "I8" or not stored.scale or "weight_zero_point" in stored.auxiliary:
        return None
    return scaled(stored, stored.main.shape, codes)


def integers(stored: Stored) -> Integers | None:
    """An I8 matrix with its zero points; None for other weights. Raises ModelError if they do not fit."""
    shape = stored.main.shape
    if stored.main.dtype != "I8" or len(shape) != 2:
        return None
    block = block_of(stored, shape)
    columns, every = np.arange(shape[1]) // block[1], np.arange(shape[0])
    scales = scale_rows(stored, shape, block)(every)
    zeros = np.zeros(scales.shape, np.int32)
    if (points := stored.auxiliary.get("weight_zero_point")) is not None:
        if points.dtype != "I8" or points.shape != stored.auxiliary["weight_scale"].shape:
            found = f"{points.dtype} {list(points.shape)}"
            raise ModelError(f"the zero points {points.name} are {found}, not as the scales")
        zeros = zeros + points.numpy().reshape(-1, scales.shape[1])[every // block[0]]

    def codes_of(rows: NDArray[np.int64]) -> NDArray[np.int32]:
        return stored.main.take_rows(rows).numpy().astype(np.int32) + 128

    return Integers(stored.name, codes_of, zeros + 128, scales, columns, 8)


def encode(name: str, values: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """A matrix [rows, columns] quantized for a file: int8 codes, and a float16 scale per GROUP columns (per row if
    columns do not divide into groups), so that the largest magnitude becomes 127. Name -> array."""
    rows, columns = values.shape
    grouped = values.reshape(rows, -1, columns if columns % GROUP else GROUP)
    scales = (np.abs(grouped).max(axis=2) / np.float32(127)).astype(np.float16)
    steps = scales.astype(np.float32)[..., None]
    codes = np.rint(np.divide(grouped, steps, out=np.zeros_like(grouped), where=steps > 0)).clip(-127, 127)
    return {name: codes.astype(np.int8).reshape(rows, columns), f"{name}_scale": scales}


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") == "int8",
    auxiliary=("weight_scale", "weight_zero_point", "scale"),
    describe=describe,
    decode=decode,
    integers=integers,
    check=lambda stored: block_of(stored, stored.main.shape),
    plans={"int8": WeightBytes(1, 1, 1, 2, "int8")},
)
