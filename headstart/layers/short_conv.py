"""Gated short convolution (LFM2, Liquid AI 2025): y = W_out (C * conv(B * X)), with [B, C, X] = W_in x, and a causal
convolution of a few taps by channel. Formula: transformers 5.23, `Lfm2ShortConv`.

Canonical tensors under `{layer}.conv`: `in_proj.weight` [3 H, in], `conv.weight` [H, (1,) width] (taps oldest first),
`out_proj.weight` [H, H].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headstart.kernels.ops import Buffer, Ops, Pool, Weight
from headstart.kernels.states import ConvSpec, StateSpec
from headstart.layers.linear import Linear
from headstart.layers.weights import Shapes, Weights


@dataclass(frozen=True)
class ShortConvConfig:
    """A gated short convolution in place of attention."""

    conv_width: int

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, reads: int) -> ShortConv:
        """That of the layer `prefix`, which reads as many columns as `reads`."""
        name, width = f"{prefix}.conv", self.conv_width
        three = weights.raw(f"{name}.in_proj.weight", (3 * hidden, reads))
        b, c, x = (Linear(weights.take(three.take_rows(np.arange(hidden) + i * hidden))) for i in range(3))
        taps = weights.raw(f"{name}.conv.weight", (hidden, 1, width), (hidden, width))
        return ShortConv(
            b_proj=b,
            c_proj=c,
            x_proj=x,
            taps=weights.take(taps.shaped(hidden, width).transposed().shaped(hidden * width)),
            out_proj=weights.linear(f"{name}.out_proj", hidden, hidden),
            conv=ConvSpec(hidden, width),
        )

    def shapes(self, prefix: str, hidden: int, *, reads: int) -> Shapes:
        """Names and shapes of what `build` takes."""
        return {
            f"{prefix}.conv.in_proj.weight": (3 * hidden, reads),
            f"{prefix}.conv.conv.weight": (hidden, 1, self.conv_width),
            f"{prefix}.conv.out_proj.weight": (hidden, hidden),
        }


@dataclass(frozen=True)
class ShortConv:
    """See the module."""

    b_proj: Linear
    c_proj: Linear
    x_proj: Linear
    taps: Weight
    out_proj: Linear
    conv: ConvSpec
    kv_specs: tuple[()] = ()
    shares: None = None

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return (self.conv,)

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        """`pool`: that of the convolution; None where whole texts are trained on."""
        b, c, inner = self.b_proj(ops, x), self.c_proj(ops, x), self.x_proj(ops, x)
        mixed = ops.causal_conv(ops.activate_mul(b, inner, "identity"), self.taps, pool, self.conv)
        return self.out_proj(ops, ops.activate_mul(c, mixed, "identity"))
