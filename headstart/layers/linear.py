"""A matrix with an optional bias."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.kernels.ops import Buffer, Ops, Weight


@dataclass(frozen=True)
class Linear:
    """[R, in] -> [R, out]; weight [out, in]."""

    weight: Weight
    bias: Weight | None = None

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        return ops.linear(x, self.weight, self.bias)
