"""SwiGLU feed-forward (Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.kernels.ops import Buffer, Ops
from headstart.layers.linear import Linear


@dataclass(frozen=True)
class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        return self.down_proj(ops, ops.silu_mul(self.gate_proj(ops, x), self.up_proj(ops, x)))
