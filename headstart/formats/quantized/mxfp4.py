"""MXFP4: FP4 (E2M1) with a power of two as scale for 32 columns.

Repacked into ggml's MXFP4 blocks, which hold the same numbers. Twice the value of a code is a small integer, so sums
inside a group are exact integers.
"""

import math

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.quantization import Decode, Described, Quantization, Repacked, Stored, WeightBytes
from headstart.formats.quantized._four_bits import codes, group_of, unpacked_shape
from headstart.formats.quantized._scaled import numbers, scaled

GROUP = 32
BYTES = 0.5 + 1 / 32


def describe(stored: Stored) -> Described | None:
    shape = stored.main.shape
    if "_scales" in stored.auxiliary and len(shape) > 2:  # [..., groups, 16 bytes]
        return Described((*shape[:-2], shape[-2] * shape[-1] * 2), "MXFP4")
    return Described(unpacked_shape(shape), "MXFP4") if group_of(stored) == GROUP else None


def keep(stored: Stored) -> Repacked | None:
    """The weight as ggml's MXFP4. Scales are powers [..., rows, groups]. Codes are [..., rows, groups, 16] bytes in
    gpt-oss's stacks, [..., rows, columns / 2] in other files. None for scales or codes of other dtypes."""
    main, stacked = stored.main, stored.auxiliary.get("_scales")
    scale = stacked or stored.scale
    if scale is None or scale.dtype not in ("U8", "F8_E8M0") or main.dtype not in ("U8", "I8") or len(main.shape) < 2:
        return None
    grouped = main.shape if stacked else (*main.shape[:-1], main.shape[-1] * 2 // GROUP, GROUP // 2)
    if grouped[-1] != GROUP // 2 or scale.shape != grouped[:-1] or math.prod(grouped) != math.prod(main.shape):
        raise ModelError(
            f"{scale.name} is {scale.dtype} {list(scale.shape)}, but {main.name} is {main.dtype} {list(main.shape)}: "
            "MXFP4 needs one byte of scale for 16 bytes of codes"
        )
    if not stacked:
        numbers(scale, stored)  # raises ModelError for NaN (255); in stacks NaN is kept
    rows, groups = math.prod(grouped[:-2]), grouped[-2]
    bytes_of, powers_of = main.shaped(rows, groups * GROUP // 2), scale.shaped(rows, groups)

    def blocks(chosen: NDArray[np.int64]) -> NDArray[np.uint8]:
        pairs = bytes_of.take_rows(chosen).data.view(np.uint8).reshape(-1, groups, GROUP // 2)
        columns = np.stack((pairs & 15, pairs >> 4), axis=-1).reshape(-1, groups, GROUP)
        halves = columns[..., : GROUP // 2] | columns[..., GROUP // 2 :] << 4  # column i beside column 16 + i
        powers = powers_of.take_rows(chosen).data.view(np.uint8).reshape(-1, groups, 1)
        return np.concatenate((powers, halves), axis=-1).reshape(len(chosen), -1)

    return Repacked("MXFP4", blocks)


def decode(stored: Stored) -> Decode | None:
    """A weight whose scales are no powers of two."""
    main, scale = stored.main, stored.scale
    if len(main.shape) < 2 or scale is None or scale.shape[:-1] != main.shape[:-1] or main.dtype not in ("U8", "I8"):
        return None
    return scaled(stored, unpacked_shape(main.shape), codes, (1, GROUP))


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") == "mxfp4",
    packed=("weight_packed",),
    auxiliary=("weight_scale", "scale"),
    after=("_scales",),
    describe=describe,
    decode=decode,
    keep=keep,
    bits=4,
    plans={"mxfp4": WeightBytes(2, 2, BYTES, 2), "fp4-fp8": WeightBytes(1, 1, BYTES, 2, "fp8")},
)
