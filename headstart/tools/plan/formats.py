"""Weight and cache formats: bytes per element of each part, and the precision that products run in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headstart.errors import UsageError
from headstart.tools.plan.shape import Part, Shape


@dataclass(frozen=True)
class WeightFormat:
    """Bytes of one weight, scales included. `compute` is tried first, then what the device has of COMPUTE_ORDER."""

    attention: float
    mlp: float
    experts: float
    lm_head: float
    compute: str = "bf16"
    head: float | None = None  # the blocks of a drafting head; None: as the trunk's

    def bytes_of(self, part: Part) -> float:
        sizes = {"attention": self.attention, "mlp": self.mlp, "experts": self.experts}
        return sizes.get(part, self.lm_head)


GROUPED_INT4 = 0.5 + 2.5 / 128
"""Groups of 128 with a 16-bit scale and a 4-bit zero point (AWQ, GPTQ)."""
MX_FP4 = 0.5 + 1 / 32
NV_FP4 = 0.5 + 1 / 16

FORMATS: Mapping[str, WeightFormat] = {
    "bf16": WeightFormat(2, 2, 2, 2),
    "fp8": WeightFormat(1, 1, 1, 2, "fp8"),
    "int8": WeightFormat(1, 1, 1, 2, "int8"),
    "int4": WeightFormat(GROUPED_INT4, GROUPED_INT4, GROUPED_INT4, 2, head=2),
    "nvfp4": WeightFormat(NV_FP4, NV_FP4, NV_FP4, 2, "fp4"),
    "mxfp4": WeightFormat(2, 2, MX_FP4, 2),
    "fp4-fp8": WeightFormat(1, 1, MX_FP4, 2, "fp8"),
    "q8_0": WeightFormat(1.0625, 1.0625, 1.0625, 1.0625, "int8"),
    "q4_1": WeightFormat(0.625, 0.625, 0.625, 1.0625, "int8"),
    "q4_k_m": WeightFormat(0.6, 0.6, 0.6, 0.82, "int8"),
    "mlx4": WeightFormat(0.5625, 0.5625, 0.5625, 0.5625),
}
KV_BYTES: Mapping[str, float] = {"float32": 4, "bf16": 2, "bfloat16": 2, "fp8": 1, "int8": 1, "int4": 0.5625}
COMPUTE_ORDER = ("fp8", "int8", "bf16")


def weight_format(name: str) -> WeightFormat:
    if name not in FORMATS:
        raise UsageError(f"--weights is {name!r}, which is not known", f"known: {', '.join(FORMATS)}")
    return FORMATS[name]


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


def part_bytes(shape: Shape, weights: WeightFormat, part: Part) -> float:
    """Bytes of one weight of a part: as measured in the checkpoint, else by the format."""
    return shape.bytes_per_weight.get(part, weights.bytes_of(part))
