"""compressed-tensors: integers packed along the input into 32-bit words, zero points along the output. Its bytes are
int8, its floats fp8, nvfp4 and mxfp4."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.integers import Integers, unpacked
from headstart.formats.quantization import Described, Quantization, Stored, bits_of


def describe(stored: Stored) -> Described | None:
    shape = stored.main.shape
    if stored.word != "weight_packed" or (shape and stored.main.dtype == "U8"):
        return None
    bits = bits_of(stored.settings)
    if not shape:
        return Described(None, "packed")
    return Described((*shape[:-1], shape[-1] * 32 // bits), f"int{bits} (compressed-tensors)")


def integers(stored: Stored) -> Integers | None:
    if len(stored.main.shape) != 2 or "weight_chan_scale" in stored.beside or "weight_global_scale" in stored.beside:
        return None
    words, bits = stored.main.numpy(), bits_of(stored.settings)
    scales = stored.beside["weight_scale"].float32()
    if 32 % bits or len(scales.shape) != 2 or len(scales) != len(words):
        return None
    (rows, num_words), count = words.shape, scales.shape[1]
    shape = stored.beside.get("weight_shape")
    columns = int(shape.numpy()[1]) if shape is not None else num_words * 32 // bits
    if not count or columns % count or not 0 < columns <= num_words * 32 // bits:
        raise ModelError(f"{stored.main.name}: {columns} columns do not make {count} groups of one size")
    order = stored.beside.get("weight_g_idx")
    groups = np.arange(columns) // (columns // count) if order is None else order.numpy().astype(np.int64)
    zeros = np.full(scales.shape, 1 << bits - 1, np.int32)
    if (points := stored.beside.get("weight_zero_point")) is not None:
        if points.dtype == "I32":  # packed, along the rows
            zeros = unpacked(np.ascontiguousarray(points.numpy().T), bits).T[:rows]
        else:
            zeros = zeros + points.numpy()

    def codes(chosen: NDArray[np.int64]) -> NDArray[np.int32]:
        return unpacked(np.ascontiguousarray(words[chosen]), bits)[:, :columns]

    return Integers(stored.name, codes, np.ascontiguousarray(zeros), scales, groups, bits)


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") == "compressed-tensors",
    excludes={"compressed-tensors": "ignore"},
    packed=("weight_packed",),
    beside=("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
            "weight_chan_scale"),
    needs=(("weight_scale",),),
    describe=describe,
    integers=integers,
)  # fmt: skip
