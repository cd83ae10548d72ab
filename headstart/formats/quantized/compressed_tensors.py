"""compressed-tensors: integers packed along the input into 32-bit words. Its floats are fp8, nvfp4 and mxfp4. Not read
yet."""

from __future__ import annotations

from headstart.formats.quantization import Described, Quantization, Stored, bits_of


def describe(stored: Stored) -> Described | None:
    shape = stored.main.shape
    if stored.word != "weight_packed" or (shape and stored.main.dtype == "U8"):
        return None
    bits = bits_of(stored.settings)
    if not shape:
        return Described(None, "packed")
    return Described((*shape[:-1], shape[-1] * 32 // bits), f"int{bits} (compressed-tensors)")


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") == "compressed-tensors",
    excludes={"compressed-tensors": "ignore"},
    packed=("weight_packed",),
    beside=("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx", "weight_global_scale",
            "weight_chan_scale"),
    needs=(("weight_scale",),),
    describe=describe,
)  # fmt: skip
