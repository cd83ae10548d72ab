"""Root-mean-square norm (Zhang, Sennrich 2019) with its weight and epsilon."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.kernels.ops import Buffer, Ops, Weight


@dataclass(frozen=True)
class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight; a family with (1 + w) norms adds 1 when it loads the weight."""

    weight: Weight
    eps: float

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, ops: Ops, x: Buffer, residual: Buffer) -> tuple[Buffer, Buffer]:
        """(norm(x + residual), x + residual)."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
