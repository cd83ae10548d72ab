"""Rows apart into direction and length: x / rms(x), and rms(x) as a number by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headstart.kernels.ops import Buffer, Ops
from headstart.kernels.specs import StreamSpec
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.weights import Weights

TINY = 1e-15
"""Added to the mean square, so that rows of zeros stay zeros; nothing beside that of any other row."""
ONE = StreamSpec(1, 0, 0.0)


@dataclass(frozen=True)
class Magnitude:
    """Of rows as wide as `norm`, which has no weights."""

    norm: RMSNorm
    mean: Linear

    def apart(self, ops: Ops, x: Buffer) -> tuple[Buffer, Buffer]:
        """[R, W] -> (x / rms(x) [R, W], rms(x) [R, 1]): rms(x) is the mean of x * (x / rms(x))."""
        direction = self.norm(ops, x)
        return direction, self.mean(ops, ops.activate_mul(x, direction, "identity"))

    def of(self, ops: Ops, x: Buffer, lengths: Buffer) -> Buffer:
        """x with other lengths [R, 1]."""
        return multiplied(ops, self.norm(ops, x), lengths)


def multiplied(ops: Ops, x: Buffer, factors: Buffer) -> Buffer:
    """x [R, W] times factors [R, 1]."""
    return ops.sum_streams(x, factors, ONE)


def read_magnitude(weights: Weights, width: int) -> Magnitude:
    """Of rows [R, width]."""
    mean = weights.made(f"mean of {width}", np.full((1, width), 1 / width))
    return Magnitude(weights.plain_norm(width, TINY), Linear(mean))
