"""NVFP4: FP4 (E2M1) with an FP8 scale for 16 columns and a float32 scale for the tensor.

Value = code * (float32(scale) * factor). factor is ModelOpt's `weight_scale_2`, or 1 / compressed-tensors'
`weight_global_scale`, rounded once. Kernels use codes, scales and factor directly: twice the value of a code is a small
integer, so sums inside a group are exact integers.
"""

import math

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.grouped import Layout, joined
from headstart.formats.quantization import Described, Quantization, Repacked, Settings, Stored, WeightBytes
from headstart.formats.quantized._four_bits import group_of, unpacked_shape
from headstart.formats.quantized._scaled import not_a_scale, numbers

GROUP = 16
BYTES = 0.5 + 1 / GROUP


def detect(settings: Settings) -> bool:
    method, algorithm = settings.get("quant_method"), str(settings.get("quant_algo")).upper()
    return method == "nvfp4" or (method == "modelopt" and not algorithm.startswith("FP8"))


def describe(stored: Stored) -> Described | None:
    if stored.main.dtype == "F4":
        return Described(stored.main.shape, "FP4")
    return Described(unpacked_shape(stored.main.shape), "NVFP4") if group_of(stored) == GROUP else None


def check(stored: Stored) -> None:
    if stored.main.dtype == "F4":
        return
    scale, shape = stored.scale, stored.main.shape
    if not {"weight_scale_2", "weight_global_scale", "_scale_2"} & stored.auxiliary.keys():
        raise ModelError("the scale for the whole tensor is missing")
    if scale is None or scale.dtype != "F8_E4M3" or scale.shape != (*shape[:-1], shape[-1] * 2 // GROUP):
        what = f"{scale.name} is {scale.dtype} {list(scale.shape)}" if scale else "the scales are missing"
        raise ModelError(f"{what}; 16 columns must share one scale of F8_E4M3")


def factors(stored: Stored) -> NDArray[np.float32]:
    """The factors of the FP8 scales: float32 [1], or [stack] for a stack of matrices. Raises ModelError."""
    divides = "weight_global_scale" in stored.auxiliary
    words = ("weight_global_scale",) if divides else ("weight_scale_2", "_scale_2")
    scale = next(stored.auxiliary[word] for word in words if word in stored.auxiliary)
    found = numbers(scale, stored).reshape(-1)
    if len(found) not in (1, math.prod(stored.main.shape[:-2])):
        raise not_a_scale(scale, stored)
    if divides and not found.all():
        raise ModelError(f"{scale.name} is 0, but {stored.name} is divided by it", "fetch the file again")
    return np.float32(1) / found if divides else found


def keep(stored: Stored) -> Repacked | None:
    if stored.main.dtype == "F4":
        return None
    check(stored)
    shape, scale = unpacked_shape(stored.main.shape), stored.scale
    assert scale is not None
    numbers(scale, stored)  # raises ModelError for NaN
    layout, factor = Layout("E2M1", GROUP, "E4M3"), factors(stored)
    codes, scales = (each.as_matrix() for each in (stored.main, scale))

    def rows(chosen: NDArray[np.int64]) -> NDArray[np.uint8]:
        own = factor[chosen // shape[-2] % len(factor)]
        return joined(layout, codes.take_rows(chosen).data, scales.take_rows(chosen).data, factors=own)

    return Repacked(layout.name, rows)


QUANTIZATION = Quantization(
    detect=detect,
    excludes={"modelopt": "ignore"},
    packed=("weight_packed",),
    auxiliary=("weight_scale", "weight_scale_2", "weight_global_scale"),
    after=("_scale_2",),
    check=check,
    describe=describe,
    keep=keep,
    bits=4,
    plans={"nvfp4": WeightBytes(BYTES, BYTES, BYTES, 2, "fp4")},
)
