"""FP8 codes with a scale for a tensor, a row, or a block of rows and columns: DeepSeek's `weight_scale_inv`, the
`weight_scale` of compressed-tensors, fbgemm and ModelOpt; as bytes it is a power of two (MXFP8).

Read as DeepSeek's own conversion script does: float32(code) * scale, rounded once to bfloat16.
"""

from __future__ import annotations

from headstart.formats.base import Tensor
from headstart.formats.quantization import ACTIVATIONS, Decode, Described, Quantization, Settings, Stored, WeightBytes
from headstart.formats.quantized._scaled import block_of, scaled


def detect(settings: Settings) -> bool:
    method, algorithm = settings.get("quant_method"), str(settings.get("quant_algo")).lower()
    return method in ("fp8", "fbgemm_fp8") or algorithm.startswith("fp8")


def describe(stored: Stored) -> Described | None:
    if stored.packed or not stored.main.dtype.startswith("F8_E"):
        return None
    scale, shape = stored.scale, stored.main.shape
    if scale is None:
        return None
    if len(scale.shape) < 2 or len(shape) < 2 or 0 in scale.shape[-2:] or 1 in scale.shape[-2:]:
        return Described(shape, "FP8")
    sizes = (-(-size // count) for size, count in zip(shape[-2:], scale.shape[-2:], strict=True))
    rows, columns = (1 << (size - 1).bit_length() if size > 1 else size for size in sizes)
    return Described(shape, f"FP8 ({rows}x{columns} blocks)")


def decode(stored: Stored) -> Decode:
    return scaled(stored, stored.main.shape, Tensor.float32)


QUANTIZATION = Quantization(
    detect=detect,
    excludes={"fp8": "modules_to_not_convert", "fbgemm_fp8": "modules_to_not_convert"},
    beside=("weight_scale_inv", "weight_scale", "scale", *ACTIVATIONS),
    after=("_scale_inv", "_input_scale", "_weight_scale", "_scale"),
    describe=describe,
    decode=decode,
    check=lambda stored: block_of(stored, stored.main.shape),
    plans={"fp8": WeightBytes(1, 1, 1, 2, "fp8")},
)
