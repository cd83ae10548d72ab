"""MXFP4: FP4 (E2M1) with a power of two for 32 columns, two codes in a byte."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headstart.formats.base import Tensor
from headstart.formats.quantization import Decode, Described, Quantization, Stored, WeightBytes
from headstart.formats.quantized._four_bits import group_of, unpacked
from headstart.formats.quantized._scaled import scaled

GROUP = 32
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The sixteen values of E2M1."""
BYTES = 0.5 + 1 / 32


def describe(stored: Stored) -> Described | None:
    shape = stored.main.shape
    if "_scales" in stored.beside and len(shape) > 2:  # [..., groups, 16 bytes]
        return Described((*shape[:-2], shape[-2] * shape[-1] * 2), "MXFP4")
    return Described(unpacked(shape), "MXFP4") if group_of(stored) == GROUP else None


def codes(stored: Tensor) -> NDArray[np.float32]:
    raw = stored.data
    return np.stack((VALUES[raw & 15], VALUES[raw >> 4]), axis=-1).reshape(len(raw), -1)


def decode(stored: Stored) -> Decode | None:
    main, scale = stored.main, stored.scale
    if stored.word != "weight" or len(main.shape) != 2 or scale is None or scale.shape[:-1] != main.shape[:-1]:
        return None
    return scaled(stored, unpacked(main.shape), codes, (1, GROUP))


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") == "mxfp4",
    packed=("weight_packed",),
    beside=("weight_scale", "scale"),
    after=("_scales",),
    describe=describe,
    decode=decode,
    bits=4,
    plans={"mxfp4": WeightBytes(2, 2, BYTES, 2), "fp4-fp8": WeightBytes(1, 1, BYTES, 2, "fp8")},
)
