"""SwiGLU feed-forward (Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headstart.kernels.ops import Buffer, Ops
from headstart.layers.linear import Linear

if TYPE_CHECKING:
    from headstart.layers.build import Weights


@dataclass(frozen=True)
class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        return self.down_proj(ops, ops.activate_mul(self.gate_proj(ops, x), self.up_proj(ops, x)))

    @staticmethod
    def of(weights: Weights, prefix: str, hidden: int, inner: int, *, bias: bool = False) -> GatedMLP:
        """From the tensors under `prefix` (no trailing dot): gate_proj, up_proj, down_proj."""
        return GatedMLP(
            weights.linear(f"{prefix}.gate_proj", inner, hidden, bias=bias),
            weights.linear(f"{prefix}.up_proj", inner, hidden, bias=bias),
            weights.linear(f"{prefix}.down_proj", hidden, inner, bias=bias),
        )

    @staticmethod
    def shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
        """Names and shapes of those tensors, without biases."""
        return {
            f"{prefix}.gate_proj.weight": (inner, hidden),
            f"{prefix}.up_proj.weight": (inner, hidden),
            f"{prefix}.down_proj.weight": (hidden, inner),
        }
