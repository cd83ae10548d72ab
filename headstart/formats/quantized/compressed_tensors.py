"""compressed-tensors: integers packed along the input into 32-bit words.

Zero points are packed along the output. Its 8-bit integers are read by int8, its floats by fp8, nvfp4 and mxfp4.
"""

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.integers import Integers, equal_groups, unpacked
from headstart.formats.quantization import Described, Quantization, Stored, bits_of


def describe(stored: Stored) -> Described | None:
    shape = stored.main.shape
    if stored.word != "weight_packed" or (shape and stored.main.dtype == "U8"):
        return None
    bits = bits_of(stored.settings)
    if not shape:
        return Described(None, "packed")
    return Described((*shape[:-1], shape[-1] * 32 // bits), f"int{bits} (compressed-tensors)")


def _bits_and_columns(stored: Stored) -> tuple[int, int]:
    """Bits of a code and columns of the weight, by `weight_shape` if present (config groups may differ in bits), else
    by the config. Raises ModelError if the words do not hold that shape."""
    num_words, bits = stored.main.shape[1], bits_of(stored.settings)
    if (shape := stored.auxiliary.get("weight_shape")) is None:
        return bits, num_words * 32 // bits
    columns = int(shape.numpy().reshape(-1)[-1])
    for each in (bits, 8, 4, 2):
        if columns > 0 and 32 % each == 0 and num_words == -(-columns * each // 32):
            return each, columns
    raise ModelError(f"{stored.main.name}: {num_words} words of 32 bits do not hold {columns} columns of {bits} bits")


def integers(stored: Stored) -> Integers | None:
    if len(stored.main.shape) != 2 or {"weight_chan_scale", "weight_global_scale"} & stored.auxiliary.keys():
        return None
    words, scales = stored.main.numpy(), stored.auxiliary["weight_scale"].float32()
    bits, columns = _bits_and_columns(stored)
    if 32 % bits or len(scales.shape) != 2 or len(scales) != len(words):
        return None
    groups = equal_groups(columns, scales.shape[1], stored.main.name)
    if (order := stored.auxiliary.get("weight_g_idx")) is not None:
        groups = order.numpy().astype(np.int64)
    zeros = np.full(scales.shape, 1 << bits - 1, np.int32)
    if (points := stored.auxiliary.get("weight_zero_point")) is not None:
        is_packed = points.dtype == "I32"  # along the rows
        zeros = unpacked(points.numpy().T, bits).T[: len(words)] if is_packed else zeros + points.numpy()

    def codes(chosen: NDArray[np.int64]) -> NDArray[np.int32]:
        return unpacked(words[chosen], bits)[:, :columns]

    return Integers(stored.name, codes, np.ascontiguousarray(zeros), scales, groups, bits)


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") == "compressed-tensors",
    excludes={"compressed-tensors": "ignore"},
    packed=("weight_packed",),
    auxiliary=("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
            "weight_chan_scale"),
    needs=(("weight_scale",),),
    describe=describe,
    integers=integers,
)  # fmt: skip
