"""NVFP4: FP4 (E2M1) with an FP8 scale for 16 columns and one for the tensor, two codes in a byte. Not read yet."""

from __future__ import annotations

from headstart.errors import ModelError
from headstart.formats.quantization import Described, Quantization, Settings, Stored, WeightBytes
from headstart.formats.quantized._four_bits import group_of, unpacked

BYTES = 0.5 + 1 / 16


def detect(settings: Settings) -> bool:
    method, algorithm = settings.get("quant_method"), str(settings.get("quant_algo")).upper()
    return method == "nvfp4" or (method == "modelopt" and algorithm != "FP8")


def describe(stored: Stored) -> Described | None:
    if stored.main.dtype == "F4":
        return Described(stored.main.shape, "FP4")
    return Described(unpacked(stored.main.shape), "NVFP4") if group_of(stored) == 16 else None


def check(stored: Stored) -> None:
    if stored.main.dtype != "F4" and not {"weight_scale_2", "weight_global_scale"} & stored.beside.keys():
        raise ModelError("no scale for the whole tensor stands beside it")


QUANTIZATION = Quantization(
    detect=detect,
    excludes={"modelopt": "ignore"},
    packed=("weight_packed",),
    beside=("weight_scale", "weight_scale_2", "weight_global_scale"),
    after=("_scale_2",),
    check=check,
    describe=describe,
    bits=4,
    plans={"nvfp4": WeightBytes(BYTES, BYTES, BYTES, 2, "fp4")},
)
