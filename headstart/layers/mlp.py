"""SwiGLU feed-forward (Shazeer 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.kernels.ops import Buffer, Ops
from headstart.layers.linear import Linear
from headstart.layers.weights import Shapes, Weights


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """`inner`: its width. Canonical tensors under its prefix: gate_proj, up_proj, down_proj."""

    inner: int
    bias: bool = False

    def build(self, weights: Weights, prefix: str, hidden: int) -> GatedMLP:
        """From the tensors under `prefix` (no trailing dot)."""
        return GatedMLP(
            weights.linear(f"{prefix}.gate_proj", self.inner, hidden, bias=self.bias),
            weights.linear(f"{prefix}.up_proj", self.inner, hidden, bias=self.bias),
            weights.linear(f"{prefix}.down_proj", hidden, self.inner, bias=self.bias),
        )

    def shapes(self, prefix: str, hidden: int) -> Shapes:
        """Names and shapes of those tensors."""
        up, down = (self.inner, hidden), (hidden, self.inner)
        matrices = {"gate_proj": up, "up_proj": up, "down_proj": down}
        shapes: Shapes = {f"{prefix}.{name}.weight": shape for name, shape in matrices.items()}
        return shapes | ({f"{prefix}.{name}.bias": each[:1] for name, each in matrices.items()} if self.bias else {})


@dataclass(frozen=True)
class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        return self.down_proj(ops, ops.activate_mul(self.gate_proj(ops, x), self.up_proj(ops, x)))
