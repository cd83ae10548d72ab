"""The lightning indexer of DeepSeek Sparse Attention (DeepSeek-V3.2 report, section 2.1): what a row attends to.

k = norm(W_k x), one key for each position; q = W_q c with c the compressed query of latent attention; w = W_w x. Both
are rotated in their first features. A position scores sum over heads of w * max(q . k, 0) (see Ops.choose). Two factors
of the published formula are left out, 1 / sqrt(head_dim) and 1 / sqrt(heads): they change no order. So is the Hadamard
transform of q and k, which keeps q . k as it is. Formula: transformers 5.23, `DeepseekV32Indexer`.

Canonical tensors under `{layer}.self_attn.indexer`: `wq_b`, `wk`, `weights_proj`, `k_norm` (weight and bias).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headstart.kernels.indexing import IndexSpec
from headstart.kernels.ops import Buffer, Ops, Pool, RopeSpec, Weight
from headstart.layers.linear import Linear
from headstart.layers.norm import LayerNorm
from headstart.layers.rope import half_split
from headstart.layers.weights import Shapes, Weights

EPS = 1e-6
"""Of the norm of keys, whatever the config says (as in DeepSeek's code)."""


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Sizes. `interleaved`: the file has the two halves of a rotary pair side by side."""

    spec: IndexSpec
    rope: RopeSpec
    interleaved: bool = False

    def build(self, weights: Weights, attention: str, rank: int, *, reads: int) -> Indexer:
        """That of the layer whose tensors begin with `attention`; queries come from `rank` columns."""
        spec, name, order = self.spec, f"{attention}.indexer", self._order()
        heads, dim = spec.num_heads, spec.head_dim
        queries = (np.arange(heads)[:, None] * dim + order).reshape(-1)
        norm = weights.raw(f"{name}.k_norm.weight", (dim,)), weights.raw(f"{name}.k_norm.bias", (dim,))
        query, key = (
            weights.raw(f"{name}.wq_b.weight", (heads * dim, rank)),
            weights.raw(f"{name}.wk.weight", (dim, reads)),
        )
        return Indexer(
            query=Linear(weights.take(query.take_rows(queries))),
            key=Linear(weights.take(key.take_rows(order))),
            key_norm=LayerNorm(weights.take(norm[0].take_rows(order)), EPS),
            key_bias=weights.take(norm[1].take_rows(order)),
            weights=Linear(weights.get(f"{name}.weights_proj.weight", heads, reads, precise=True)),
            config=self,
        )

    def shapes(self, attention: str, rank: int, *, reads: int) -> Shapes:
        """Names and shapes of what `build` takes."""
        heads, dim = self.spec.num_heads, self.spec.head_dim
        return {
            f"{attention}.indexer.wq_b.weight": (heads * dim, rank),
            f"{attention}.indexer.wk.weight": (dim, reads),
            f"{attention}.indexer.k_norm.weight": (dim,),
            f"{attention}.indexer.k_norm.bias": (dim,),
            f"{attention}.indexer.weights_proj.weight": (heads, reads),
        }

    def _order(self) -> NDArray[np.int64]:
        """Features of a head as Ops.rope takes them."""
        rotary = self.rope.rotary_dim
        rest = np.arange(rotary, self.spec.head_dim)
        return np.concatenate((half_split(rotary, interleaved=self.interleaved), rest))


@dataclass(frozen=True)
class Indexer:
    """See the module."""

    query: Linear
    key: Linear
    key_norm: LayerNorm
    key_bias: Weight
    weights: Linear
    config: IndexerConfig

    def project(self, ops: Ops, x: Buffer) -> tuple[Buffer, Buffer]:
        """Rows [R, H] -> keys as yet without norm and rope, and weights [R, heads]: beside other matrices over x."""
        return self.key(ops, x), self.weights(ops, x)

    def __call__(self, ops: Ops, k: Buffer, w: Buffer, queries: Buffer, positions: Buffer, pool: Pool) -> None:
        """Keys and weights of `project`, compressed queries [R, rank]: keeps the keys in `pool`, and chooses."""
        spec, rope = self.config.spec, self.config.rope
        q = self.query(ops, queries)
        k = ops.rope(ops.shift(self.key_norm(ops, k), self.key_bias), positions, rope, spec.head_dim)
        q = ops.rope(q, positions, rope, spec.head_dim)
        ops.store_index(k, pool, spec)
        ops.choose(q, w, pool, spec)
