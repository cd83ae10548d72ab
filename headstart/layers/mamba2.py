"""Mamba2 (Dao, Gu 2024): a selective state space model over heads, in its recurrent form for every row.

[z, x, B, C, dt] = W_in u; [x, B, C] = activation(conv([x, B, C]) + bias); step = ln(1 + e^(dt + bias)) by head;
y = scan (see Ops.selective_scan); out = W_out norm(y * silu(z)), or W_out (norm(y) * silu(z)), the norm by groups of
columns, or none. Formula: transformers 5.23, `NemotronHMamba2Mixer` and its relatives.

Canonical tensors under `{layer}.mamba`: `in_proj.weight` [2 inner + 2 G N + heads, H] (rows in the order above, with
`in_proj.bias` or without), `conv.weight` [channels, (1,) width] (taps oldest first), `conv.bias` [channels],
`decay_rate` [heads] (negative), `step_bias` [heads], `skip` [heads], `norm.weight` [inner], `out_proj.weight`.
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise, starmap
from typing import ClassVar, Literal

import numpy as np

from headstart.kernels.ops import Activation, Buffer, Ops, Pool, Weight
from headstart.kernels.specs import ConvSpec, ScanSpec, StateSpec
from headstart.layers.linear import Linear, scale
from headstart.layers.parts import Mixer, MixerConfig
from headstart.layers.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(MixerConfig):
    """Mamba2 of one layer."""

    scan: ScanSpec
    conv_width: int  # taps of the convolution
    norm: Literal["gated", "before_gate", "none"] = "gated"  # of the gated output, of the output before the gate
    norm_groups: int = 1  # groups of columns that are normed by themselves
    bias: bool = False  # of the projections
    conv_bias: bool = True
    activation: Activation = "silu"
    input_scale: float = 1.0  # multiplies u
    scales: tuple[float, ...] = (1.0,) * 5  # multiply z, x, B, C, dt
    num_kernels: ClassVar[int] = 10

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return self.conv, self.scan

    @property
    def conv(self) -> ConvSpec:
        return ConvSpec(self.scan.channels, self.conv_width)

    @property
    def rows(self) -> int:
        """Rows of the input projection."""
        return self.scan.inner + self.scan.channels + self.scan.num_heads

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, in_features: int) -> "Mamba2":
        """See MixerConfig.build. Steps are never quantized: errors would accumulate over a whole text."""
        name, scan = f"{prefix}.mamba", self.scan
        matrix = weights.raw(f"{name}.in_proj.weight", (self.rows, in_features))
        taps = weights.taps(f"{name}.conv.weight", self.conv)
        conv_bias = weights.get(f"{name}.conv.bias", scan.channels) if self.conv_bias else None
        rate, step, skip = (
            weights.get(f"{name}.{part}", scan.num_heads) for part in ("decay_rate", "step_bias", "skip")
        )
        norm = None if self.norm == "none" else weights.get(f"{name}.norm.weight", scan.inner)
        output = weights.get(f"{name}.out_proj.weight", hidden, scan.inner)
        bias = weights.raw(f"{name}.in_proj.bias", (self.rows,)) if self.bias else None

        def linear(begin: int, end: int) -> Linear:
            rows = partial(np.arange, begin, end)
            weight = weights.take(lambda: matrix.take_rows(rows()), precise=end == self.rows)
            return Linear(weight, weights.take(lambda: bias.take_rows(rows())) if bias else None)

        z, *xbc, dt = starmap(linear, pairwise(accumulate(self._parts, initial=0)))
        return Mamba2(
            z_proj=z,
            xbc_projs=tuple(xbc),
            dt_proj=dt,
            taps=taps,
            conv_bias=conv_bias,
            decay_rate=rate,
            step_bias=step,
            skip=skip,
            norm=norm,
            out_proj=Linear(output, weights.get(f"{name}.out_proj.bias", hidden) if self.bias else None),
            eps=eps,
            config=self,
        )

    @property
    def _parts(self) -> list[int]:
        """Rows of the projections: z, [x, B, C] together or, if they are scaled, each by itself, and dt."""
        keys = self.scan.num_groups * self.scan.state_dim
        unscaled = set(self.scales[1:4]) == {1.0}
        channels = [self.scan.channels] if unscaled else [self.scan.inner, keys, keys]
        return [self.scan.inner, *channels, self.scan.num_heads]


@dataclass(frozen=True)
class Mamba2(Mixer):
    """The Mamba2 part of a layer; formula in the module's docstring."""

    z_proj: Linear
    xbc_projs: tuple[Linear, ...]
    dt_proj: Linear
    taps: Weight
    conv_bias: Weight | None
    decay_rate: Weight
    step_bias: Weight
    skip: Weight
    norm: Weight | None
    out_proj: Linear
    eps: float
    config: Mamba2Config

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        """`pool`: the pools of the convolution and of the scan; None in training."""
        config, (conv_pool, scan_pool) = self.config, pool or (None, None)
        x = scale(ops, x, config.input_scale)
        z, parts, dt = self.z_proj(ops, x), [each(ops, x) for each in self.xbc_projs], self.dt_proj(ops, x)
        z, dt = scale(ops, z, config.scales[0]), scale(ops, dt, config.scales[4])
        xbc = parts[0]
        if len(parts) > 1:
            xbc, b, c = (ops.scale(each, factor) for each, factor in zip(parts, config.scales[1:4], strict=True))
            xbc = ops.concat(ops.concat(xbc, b), c)
        xbc = ops.activate(ops.causal_conv(xbc, self.taps, conv_pool, config.conv, self.conv_bias), config.activation)
        step = ops.softplus(dt, None, self.step_bias)
        y = ops.selective_scan(xbc, step, self.decay_rate, self.skip, scan_pool, config.scan)
        if config.norm == "before_gate":
            y = self._normed(ops, y)
        y = ops.activate_mul(z, y)
        return self.out_proj(ops, self._normed(ops, y) if config.norm == "gated" else y)

    def _normed(self, ops: Ops, y: Buffer) -> Buffer:
        return ops.rms_norm(y, self.norm, self.eps, self.config.norm_groups)
