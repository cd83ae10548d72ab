"""Weight and cache formats: bytes per element of each part, and the precision that products run in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.errors import UsageError
from headstart.formats.quantization import WeightBytes, declared, quantizations
from headstart.tools.plan.shape import Part, Shape

GGUF: Mapping[str, WeightBytes] = {
    "q8_0": WeightBytes(1.0625, 1.0625, 1.0625, 1.0625, "int8"),
    "q4_1": WeightBytes(0.625, 0.625, 0.625, 1.0625, "int8"),
    "q4_k_m": WeightBytes(0.6, 0.6, 0.6, 0.82, "int8"),
}
KV_BYTES: Mapping[str, float] = {"float32": 4, "bf16": 2, "bfloat16": 2, "fp8": 1, "int8": 1, "int4": 0.5625}
COMPUTE_ORDER = ("fp8", "int8", "bf16")


def weight_format(name: str) -> WeightBytes:
    """A format by name: plain, a quantization's, or GGUF's. Raises UsageError."""
    named = {name: each for quantization in quantizations().values() for name, each in quantization.plans.items()}
    known = {"bf16": WeightBytes(2, 2, 2, 2), **named, **GGUF}
    if name not in known:
        raise UsageError(f"--weights is {name!r}, which is not known", f"known: {', '.join(known)}")
    return known[name]


def declared_format(config: Mapping[str, Any]) -> str:
    """By quantization_config; bf16 without one."""
    quantization = declared(config)
    return next(iter(quantization.plans), "bf16") if quantization else "bf16"


def kv_bytes(name: str) -> float:
    if name not in KV_BYTES:
        raise UsageError(f"--kv-dtype is {name!r}, which is not known", f"known: {', '.join(KV_BYTES)}")
    return KV_BYTES[name]


def precision(wanted: str, tflops: Mapping[str, float]) -> str:
    """The precision products run in on a device: the one wanted, else the next wider one that it has."""
    if wanted in tflops:
        return wanted
    wider = COMPUTE_ORDER[COMPUTE_ORDER.index(wanted) + 1 :] if wanted in COMPUTE_ORDER else COMPUTE_ORDER
    return next(name for name in wider if name in tflops and not (wanted == "fp8" and name == "int8"))


def part_bytes(shape: Shape, weights: WeightBytes, part: Part) -> float:
    """Bytes of one weight of a part: as measured in the checkpoint, else by the format."""
    by_format = getattr(weights, part) if part in ("attention", "mlp", "experts") else weights.lm_head
    return shape.bytes_per_weight.get(part, by_format)
