"""Gated short convolution (LFM2, Liquid AI 2025): y = W_out (C * conv(B * X)), with [B, C, X] = W_in x.

The convolution is causal, a few taps per channel. Formula: transformers 5.23, `Lfm2ShortConv`.

Canonical tensors under `{layer}.conv`: `in_proj.weight` [3 H, in], `conv.weight` [H, (1,) width] (taps oldest first),
`out_proj.weight` [H, H].
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from headstart.kernels.ops import Buffer, Ops, Pool, Weight
from headstart.kernels.specs import ConvSpec, StateSpec
from headstart.layers.linear import Linear
from headstart.layers.parts import Mixer, MixerConfig
from headstart.layers.weights import Weights


@dataclass(frozen=True)
class ShortConvConfig(MixerConfig):
    """A gated short convolution of one layer."""

    channels: int  # the hidden size
    conv_width: int  # taps
    num_kernels: ClassVar[int] = 10

    @property
    def conv(self) -> ConvSpec:
        return ConvSpec(self.channels, self.conv_width)

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return (self.conv,)

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, in_features: int) -> "ShortConv":
        """See MixerConfig.build."""
        name = f"{prefix}.conv"
        three = weights.raw(f"{name}.in_proj.weight", (3 * hidden, in_features))

        def part(i: int) -> Linear:
            return Linear(weights.take(lambda: three.take_rows(np.arange(hidden) + i * hidden)))

        return ShortConv(
            b_proj=part(0), c_proj=part(1), x_proj=part(2),
            taps=weights.taps(f"{name}.conv.weight", self.conv),
            out_proj=weights.linear(f"{name}.out_proj", hidden, hidden), config=self,
        )  # fmt: skip


@dataclass(frozen=True)
class ShortConv(Mixer):
    """The gated short convolution of a layer; formula in the module's docstring."""

    b_proj: Linear
    c_proj: Linear
    x_proj: Linear
    taps: Weight
    out_proj: Linear
    config: ShortConvConfig

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        """`pool`: the pool of the convolution; None in training."""
        b, c, inner = self.b_proj(ops, x), self.c_proj(ops, x), self.x_proj(ops, x)
        mixed = ops.causal_conv(ops.activate_mul(b, inner, "identity"), self.taps, pool, self.config.conv)
        return self.out_proj(ops, ops.activate_mul(c, mixed, "identity"))
