"""An LM head for drafts over a large vocabulary: few columns for all tokens, all columns for the most likely ones.

x . w = (P x) . (B w) for the right P [k, H] and B [k, H], nearly, with k far below H: hidden states lie in few
directions. Of all rank-k approximations the one over whitened states is best (L L^T their second moments, V the first
eigenvectors of L^T W^T W L: P = V^T L^-1, B = V^T L^T; the plain SVD of W, as in Shim et al. 2017, "SVD-softmax",
misses three to ten times as many of the best tokens here). Scanned are rows B w, rounded to int4; of the blocks of
tokens that promise most the logits are computed in full. What a draft says never changes the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from headstart.kernels.ops import Buffer, Ops, Weight
from headstart.layers.linear import Linear

Array = NDArray[np.float32]
SHRINK = 0.3
"""Of each feature's own second moment, added to it: a few hundred states do not tell how features go together."""


@dataclass(frozen=True)
class SketchedLinear:
    """[R, H] -> [R, V]. `project` [k, H], `scan` [V, k]; `count`: blocks of tokens (see Ops.refine) that are exact."""

    exact: Linear
    project: Weight
    scan: Weight
    count: int

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        promised = ops.linear(ops.linear(x, self.project), self.scan)
        return ops.refine(promised, x, self.exact.weight, self.count)


class LMHead(Protocol):
    """What makes logits of hidden states."""

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        """[R, H] -> [R, V]."""


def directions(rows: Array, states: Array, dims: int) -> tuple[Array, Array]:
    """P and B [dims, H] from some rows of the LM head [n, H] and some hidden states [m, H]; the first k of either are
    those of a smaller sketch. Raises LinAlgError where the states have no second moments (NaN, all zero)."""
    moments = states.T @ states / len(states)
    own = np.diag(moments)
    lower = np.linalg.cholesky(moments + np.diag(SHRINK * own + 1e-6 * own.mean() + 1e-30))
    mixed = rows @ lower
    vectors = np.linalg.eigh(mixed.T @ mixed)[1][:, : -dims - 1 : -1]
    return np.linalg.solve(lower.T, vectors).T.astype(np.float32), (lower @ vectors).T.astype(np.float32)
