"""Feed-forward parts: SwiGLU (Shazeer 2020) and its relatives by activation, or one without a gate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headstart.kernels.ops import Activation, Buffer, Ops, Weight
from headstart.layers.linear import Linear
from headstart.layers.magnitude import Magnitude, multiplied, read_magnitude
from headstart.layers.weights import Shapes, Weights


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """`inner`: its width. Canonical tensors under its prefix: gate_proj (if `gated`), up_proj, down_proj. `gate_scale`
    multiplies what the activation reads, `output_scale` what comes out, of a gated one. `cutoff`: see Above."""

    inner: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    gate_scale: float = 1.0
    output_scale: float = 1.0
    cutoff: float | None = None

    def build(self, weights: Weights, prefix: str, hidden: int) -> GatedMLP | MLP:
        """From the tensors under `prefix` (no trailing dot)."""
        parts = {
            name: weights.linear(f"{prefix}.{name}", *shape, bias=self.bias)
            for name, shape in self._matrices(hidden).items()
        }
        if self.gated:
            gate, up, down = parts["gate_proj"], parts["up_proj"], parts["down_proj"]
            above = None if self.cutoff is None else read_above(weights, self.inner, self.cutoff)
            return GatedMLP(gate, up, down, self.activation, self.gate_scale, self.output_scale, above)
        return MLP(parts["up_proj"], parts["down_proj"], self.activation)

    def shapes(self, prefix: str, hidden: int) -> Shapes:
        """Names and shapes of those tensors."""
        matrices = self._matrices(hidden)
        shapes: Shapes = {f"{prefix}.{name}.weight": shape for name, shape in matrices.items()}
        return shapes | ({f"{prefix}.{name}.bias": each[:1] for name, each in matrices.items()} if self.bias else {})

    def _matrices(self, hidden: int) -> dict[str, tuple[int, int]]:
        up, down = (self.inner, hidden), (hidden, self.inner)
        return {**({"gate_proj": up} if self.gated else {}), "up_proj": up, "down_proj": down}


@dataclass(frozen=True)
class Above:
    """max(x - mean(x) - cutoff std(x), 0) by row, of which few are not 0: the sparse activations of Gemma 3n.
    `threshold` [W]: -cutoff."""

    magnitude: Magnitude
    threshold: Weight

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        direction, deviation = self.magnitude.apart(ops, ops.center(x))
        kept = ops.activate(ops.shift(direction, self.threshold), "relu")
        return multiplied(ops, kept, deviation)


def read_above(weights: Weights, width: int, cutoff: float) -> Above:
    """Of rows [R, width]."""
    return Above(read_magnitude(weights, width), weights.made(f"{width} times {-cutoff}", np.full(width, -cutoff)))


@dataclass(frozen=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)), with two factors; `above`: what is kept of gate(x)."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    activation: Activation
    gate_scale: float = 1.0
    output_scale: float = 1.0
    above: Above | None = None

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        gate, up = self.gate_proj(ops, x), self.up_proj(ops, x)
        gate = gate if self.gate_scale == 1 else ops.scale(gate, self.gate_scale)
        gate = self.above(ops, gate) if self.above else gate
        y = self.down_proj(ops, ops.activate_mul(gate, up, self.activation))
        return y if self.output_scale == 1 else ops.scale(y, self.output_scale)


@dataclass(frozen=True)
class MLP:
    """down(activation(up(x)))."""

    up_proj: Linear
    down_proj: Linear
    activation: Activation

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        return self.down_proj(ops, ops.activate(self.up_proj(ops, x), self.activation))
