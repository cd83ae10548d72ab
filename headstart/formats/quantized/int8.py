"""Integers of 8 bits with a scale for a tensor, a row or a block."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.formats.base import Tensor
from headstart.formats.quantization import Decode, Described, Quantization, Stored, WeightBytes
from headstart.formats.quantized._four_bits import group_of
from headstart.formats.quantized._scaled import block_of, scaled

GROUP = 64


def describe(stored: Stored) -> Described | None:
    signs = {"SCB", "_scales"} | {word for word in stored.beside if "absmax" in word}
    if stored.packed or stored.main.dtype not in ("I8", "U8") or signs & stored.beside.keys():
        return None
    return None if group_of(stored) or not stored.scale else Described(stored.main.shape, "int8")


def codes(stored: Tensor) -> NDArray[np.float32]:
    return stored.data.view(np.int8).astype(np.float32)


def decode(stored: Stored) -> Decode | None:
    return scaled(stored, stored.main.shape, codes) if stored.main.dtype == "I8" and stored.scale else None


def encode(name: str, values: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """A matrix [rows, columns] as a file has it, with a scale for each GROUP of a row, whose largest value becomes 127
    (for a whole row, where it is no groups)."""
    rows, columns = values.shape
    grouped = values.reshape(rows, -1, columns if columns % GROUP else GROUP)
    scales = (np.abs(grouped).max(axis=2) / np.float32(127)).astype(np.float16)
    steps = scales.astype(np.float32)[..., None]
    codes = np.rint(np.divide(grouped, steps, out=np.zeros_like(grouped), where=steps > 0)).clip(-127, 127)
    return {name: codes.astype(np.int8).reshape(rows, columns), f"{name}_scale": scales}


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") == "int8",
    beside=("weight_scale", "weight_zero_point", "scale"),
    describe=describe,
    decode=decode,
    check=lambda stored: block_of(stored, stored.main.shape),
    plans={"int8": WeightBytes(1, 1, 1, 2, "int8")},
)
