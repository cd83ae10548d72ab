"""`Linear` with an optional bias, `ClippedLinear`, and `SketchedLinear`, an LM head for drafts over a large vocabulary.

A sketch estimates the logits of all tokens from few columns and computes exact logits for the most likely ones. As
hidden states lie in few directions, x . w is close to (P x) . (B w) with P and B [k, H], k far below H. The best rank-k
approximation is the one over whitened states: with L L^T their second moments and V the first eigenvectors of
L^T W^T W L, P = V^T L^-1 and B = V^T L^T. The plain SVD of W (Shim et al. 2017, "SVD-softmax") misses three to ten
times as many of the best tokens. Rows B w are int4. Only drafts use a sketch, so the text never changes.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headstart.core import Float32
from headstart.kernels.ops import Buffer, Ops, Weight

SHRINK = 0.3
"""Ridge: share of its second moment added to each feature's, since few states estimate covariances badly."""


@dataclass(frozen=True)
class Linear:
    """[R, in] -> [R, out]; weight [out, in]."""

    weight: Weight
    bias: Weight | None = None

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        return ops.linear(x, self.weight, self.bias)


BOUNDS = ("input_min", "input_max", "output_min", "output_max")
"""Names of a clipped matrix's bounds, in the order of ClippedLinear's fields."""


@dataclass(frozen=True)
class Clip:
    """min(max(x, low), high) of rows [R, width]: x + relu(low - x) - relu(x - high), which changes no x in between."""

    low: Weight  # [width]
    minus_high: Weight  # [width]

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        below = ops.activate(ops.add_bias(ops.scale(x, -1.0), self.low), "relu")
        above = ops.activate(ops.add_bias(x, self.minus_high), "relu")
        return ops.add(ops.add(x, below), ops.scale(above, -1.0))


@dataclass(frozen=True, kw_only=True)
class ClippedLinear(Linear):
    """A Linear whose inputs and outputs are clipped (Gemma 4's vision tower)."""

    inputs: Clip
    outputs: Clip

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        return self.outputs(ops, super().__call__(ops, self.inputs(ops, x)))


@dataclass(frozen=True)
class SketchedLinear:
    """[R, H] -> [R, V]: estimates for all tokens, exact logits for the most likely ones."""

    exact: Linear
    project: Weight  # P [k, H]
    scan: Weight  # rows B w [V, k]
    count: int  # blocks of tokens with exact logits (Ops.refine)

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        estimates = ops.linear(ops.linear(x, self.project), self.scan)
        return ops.refine(estimates, x, self.exact.weight, self.count)


def scale(ops: Ops, x: Buffer, factor: float) -> Buffer:
    """x * factor; no operation for 1."""
    return x if factor == 1 else ops.scale(x, factor)


class LMHead(Protocol):
    """Makes logits of hidden states."""

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        """[R, H] -> [R, V]."""


def sketch_directions(rows: Float32, states: Float32, dims: int) -> tuple[Float32, Float32]:
    """P and B [dims, H] from some rows of the LM head [n, H] and some hidden states [m, H]; the first k of either are
    those of a smaller sketch. Raises LinAlgError where the states have no second moments (NaN, all zero)."""
    moments = states.T @ states / len(states)
    own = np.diag(moments)
    lower = np.linalg.cholesky(moments + np.diag(SHRINK * own + 1e-6 * own.mean() + 1e-30))
    mixed = rows @ lower
    vectors = np.linalg.eigh(mixed.T @ mixed)[1][:, : -dims - 1 : -1]
    return np.linalg.solve(lower.T, vectors).T.astype(np.float32), (lower @ vectors).T.astype(np.float32)
