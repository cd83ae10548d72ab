"""FP8 (E4M3, E5M2, MXFP8) with a scale per tensor, row or block.

Scales are named `weight_scale_inv` (DeepSeek) or `weight_scale` (compressed-tensors, fbgemm, ModelOpt). A scale stored
as a byte is a power of two (MXFP8). Value: float32(code) * scale. Kernels use E4M3 codes directly if a block's width is
a multiple of 16, 32 or 64 columns. Other widths, and E5M2, become bfloat16.
"""

import numpy as np
from numpy.typing import NDArray

from headstart.formats import quantization
from headstart.formats.base import Tensor
from headstart.formats.grouped import Layout, joined
from headstart.formats.quantized._scaled import block_of, group_in, scale_rows, scaled


def detect(settings: quantization.Settings) -> bool:
    method, algorithm = settings.get("quant_method"), str(settings.get("quant_algo")).lower()
    return method in ("fp8", "fbgemm_fp8") or algorithm.startswith("fp8")


def describe(stored: quantization.Stored) -> quantization.Described | None:
    if stored.packed or not stored.main.dtype.startswith("F8_E"):
        return None
    scale, shape = stored.scale, stored.main.shape
    if scale is None:
        return None
    if len(scale.shape) < 2 or len(shape) < 2 or 0 in scale.shape[-2:] or 1 in scale.shape[-2:]:
        return quantization.Described(shape, "FP8")
    sizes = (-(-size // count) for size, count in zip(shape[-2:], scale.shape[-2:], strict=True))
    rows, columns = (1 << (size - 1).bit_length() if size > 1 else size for size in sizes)
    return quantization.Described(shape, f"FP8 ({rows}x{columns} blocks)")


def decode(stored: quantization.Stored) -> quantization.Decode:
    return scaled(stored, stored.main.shape, Tensor.float32)


def keep(stored: quantization.Stored) -> quantization.Repacked | None:
    """The codes and scales, if the codes are E4M3 and a block's width is a multiple of a kernel's group; else None."""
    shape = stored.main.shape
    if stored.main.dtype != "F8_E4M3" or stored.scale is None or len(shape) < 2:
        return None
    block = block_of(stored, shape)
    group = group_in(block[1], shape[-1])
    if not group:
        return None
    layout, scales_of = Layout("E4M3", group, "F32"), scale_rows(stored, shape, block)
    folded = stored.main.as_matrix()

    def rows(chosen: NDArray[np.int64]) -> NDArray[np.uint8]:
        scales = np.repeat(scales_of(chosen), -(-block[1] // group), axis=1)[:, : -(-shape[-1] // group)]
        return joined(layout, folded.take_rows(chosen).data, scales)

    return quantization.Repacked(layout.name, rows)


QUANTIZATION = quantization.Quantization(
    detect=detect,
    excludes={"fp8": "modules_to_not_convert", "fbgemm_fp8": "modules_to_not_convert"},
    auxiliary=("weight_scale_inv", "weight_scale", "scale", *quantization.ACTIVATIONS),
    after=("_scale_inv", "_input_scale", "_weight_scale", "_scale"),
    describe=describe,
    decode=decode,
    keep=keep,
    check=lambda stored: block_of(stored, stored.main.shape),
    plans={"fp8": quantization.WeightBytes(1, 1, 1, 2, "fp8")},
)
