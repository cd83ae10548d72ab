"""Weight and cache formats: bytes per element of each part, and the precision that products run in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headstart.errors import UsageError
from headstart.formats.quantization import WeightBytes, bits_of, declared, quantizations, settings_of
from headstart.formats.symbols import lookup, text_config
from headstart.tools.plan.shape import Part, Shape

GGUF: Mapping[str, WeightBytes] = {
    "q8_0": WeightBytes(1.0625, 1.0625, 1.0625, 1.0625, "int8"),
    "q6_k": WeightBytes(0.8203, 0.8203, 0.8203, 0.8203, "int8"),
    "q4_0": WeightBytes(0.5625, 0.5625, 0.5625, 0.8203, "int8"),
    "q4_1": WeightBytes(0.625, 0.625, 0.625, 1.0625, "int8"),
    "q4_k_m": WeightBytes(0.6, 0.6, 0.6, 0.82, "int8"),
}
KV_BYTES: Mapping[str, float] = {
    "float32": 4, "bf16": 2, "bfloat16": 2, "float16": 2, "auto": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1,
    "int4": 0.5625,
}  # fmt: skip
COMPUTE_ORDER = ("fp8", "int8", "bf16")


def weight_format(name: str) -> WeightBytes:
    """A format by name: plain, a quantization's, or GGUF's. Raises UsageError."""
    named = {name: each for quantization in quantizations().values() for name, each in quantization.plans.items()}
    known = {"bf16": WeightBytes(2, 2, 2, 2), **named, **GGUF}
    if name not in known:
        raise UsageError(f"--weights is {name!r}, which is not known", f"known: {', '.join(known)}")
    return known[name]


def declared_format(config: Mapping[str, Any]) -> str:
    """By quantization_config: who packed them, else (as most packers take several types) the type that it names for
    weights, and for experts where they have one of their own. bf16 without one, or for one that is not known."""
    quantization, settings = declared(config), settings_of(config)
    if quantization is None:  # MLX names nobody
        plain = "quant_method" in settings or "bits" not in settings
        return "bf16" if plain else "int8" if bits_of(settings) == 8 else "mlx4"
    experts = str(settings.get("expert_dtype") or text_config(config).get("expert_dtype") or "").lower()
    if "fp8" in quantization.plans and experts in ("fp4", "mxfp4"):
        return "fp4-fp8"
    groups = settings.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = lookup(first, "weights") if isinstance(first, Mapping) else None
    if isinstance(weights, Mapping) and weights.get("type") == "float":
        small = "mxfp4" if weights.get("group_size") == 32 else "nvfp4"
        return small if weights.get("num_bits") == 4 else "fp8"
    if (quantization.bits == 4 and bits_of(settings) == 8) or settings.get("load_in_8bit"):
        return "int8"
    return next(iter(quantization.plans), f"int{8 if bits_of(settings) > 4 else 4}")


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
