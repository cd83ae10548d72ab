"""The lightning indexer of DeepSeek Sparse Attention (DeepSeek-V3.2 report, section 2.1): selects positions per row.

k = norm(W_k x), one key per position; q = W_q c with c the compressed query of latent attention; w = W_w x. The first
features of q and k are rotated (HY-V4: the last). The score of a position is the sum over heads of w * max(q . k, 0)
(see Ops.select_positions). The published factors 1 / sqrt(head_dim) and 1 / sqrt(heads) are left out, as they change no
order; so is the Hadamard transform of q and k, which keeps q . k. Formula: transformers 5.23, `DeepseekV32Indexer`.

With pools (GLM-5.3) a key covers a window of positions, weighted by a softmax of gates (see Ops.compress), and whole
windows are selected. Formula: transformers 5.24, `Glm5NextTextIndexer`. In Step-5 (CSA) gates have no bias, queries
read x and are normed, and each group of heads selects for a KV head, beside the row's own window. Formula: vLLM 0.33,
`models/step5/nvidia` (ops/summary_update.py, sparse_indexer_scores.py, sparse_indexer.py).

A block indexer (MiniMax-M3) has a query head for each KV head of the attention, which selects blocks for that head by
the greatest q . k of a block (see Ops.select_blocks); q and k = norm(W x), rotated like the attention's. Formula:
transformers 5.24, `MiniMaxM3VLIndexer`. With pools (QSA of Qwen3.8-Flash-Next) all heads share the mean of a block's
keys before norm and rope, at the block's first position; the score of a block is the sum over heads of max(q . k, 0).
Formula: transformers 5.24, `Qwen4ExpTextQSAIndexer`.

Canonical tensors under `{layer}.self_attn.indexer`: `wq_b`, `wk`, `weights_proj`, `k_norm` (weight and bias); with
pools `pool_gate` [dim, H] and `pool_bias` [pool * dim]; in Step-5 `q_norm`. Of a block indexer: `{q,k}_proj` and
`{q,k}_norm`.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headstart.kernels.ops import Buffer, KVSpec, Ops, Pool, RopeSpec, Weight
from headstart.kernels.specs import CompressSpec, IndexSpec
from headstart.layers.linear import Linear
from headstart.layers.norm import LayerNorm, RMSNorm
from headstart.layers.rope import half_split
from headstart.layers.weights import Weights

EPS = 1e-6  # of the norm of keys, for every config of DeepSeek's (as in its code)


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Sizes of an indexer."""

    spec: IndexSpec
    rope: RopeSpec | None  # None: nothing is rotated
    interleaved: bool = False  # the file stores the two features of a rotary pair next to each other
    trailing: bool = False  # the file has the rotated features last
    eps: float = EPS  # of norms
    query_norm: bool = False
    pool_bias: bool = True  # gates of pools have a bias by place

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """Pools: of keys and gates that are pooled, and of keys."""
        return (*([self.pooled] if self.pooled else []), self.spec)

    @property
    def pooled(self) -> CompressSpec | None:
        return CompressSpec(self.spec.every, self.spec.head_dim) if self.spec.whole else None

    def build(self, weights: Weights, attention: str, rank: int, *, in_features: int) -> "Indexer":
        """The indexer of the layer whose tensor names begin with `attention`; its queries read `rank` columns."""
        spec, name = self.spec, f"{attention}.indexer"
        heads, dim = spec.num_heads, spec.head_dim

        def reordered(part: str, num_heads: int, *num_in: int) -> Weight:
            stored = weights.raw(f"{name}.{part}", (num_heads * dim, *num_in))
            starts = partial(np.arange, 0, num_heads * dim, dim)
            return weights.take(lambda: stored.take_rows((starts()[:, None] + self._order()).reshape(-1)))

        gate, bias = None, None
        if self.pooled:
            gate = Linear(reordered("pool_gate", 1, in_features))
            size = spec.every * dim
            bias = weights.get(f"{name}.pool_bias", size) if self.pool_bias else weights.zeros(size)
        query_norm = weights.norm(f"{name}.q_norm", dim, self.eps) if self.query_norm else None
        return Indexer(
            query=Linear(reordered("wq_b.weight", heads, rank)),
            key=Linear(reordered("wk.weight", 1, in_features)),
            key_norm=LayerNorm(reordered("k_norm.weight", 1), self.eps),
            key_bias=reordered("k_norm.bias", 1),
            weights=Linear(weights.get(f"{name}.weights_proj.weight", heads, in_features, precise=True)),
            pool_gate=gate,
            pool_bias=bias,
            query_norm=query_norm,
            config=self,
        )

    def _order(self) -> NDArray[np.int64]:
        """Features of a head in the order of Ops.rope."""
        rotary = self.rope.rotary_dim if self.rope else 0
        order = np.arange(self.spec.head_dim)
        order = np.roll(order, rotary) if self.trailing else order
        first, rest = order[:rotary], order[rotary:]
        return np.concatenate((first[half_split(rotary, interleaved=self.interleaved)], rest))


@dataclass(frozen=True)
class Indexer:
    """The lightning indexer of a layer: selects positions for each row; formula in the module's docstring."""

    query: Linear
    key: Linear
    key_norm: LayerNorm
    key_bias: Weight
    weights: Linear
    config: IndexerConfig
    pool_gate: Linear | None = None
    pool_bias: Weight | None = None
    query_norm: RMSNorm | None = None

    def project(self, ops: Ops, x: Buffer) -> tuple[Buffer, ...]:
        """Rows [R, H] -> (keys before norm and rope, weights [R, heads], gates of pools); recorded beside the other
        matrices over x."""
        return self.key(ops, x), self.weights(ops, x), self.pool_gate(ops, x) if self.pool_gate else None

    def __call__(
        self, ops: Ops, projected: tuple[Buffer, ...], queries: Buffer, positions: Buffer, pools: tuple[Pool, ...]
    ) -> None:
        """Stores the keys of `project` in the pools of `kv_specs` and selects positions. `queries`: what the queries
        read [R, rank]."""
        spec, rope = self.config.spec, self.config.rope
        k, w, gates = projected
        q = self.query(ops, queries)
        q = self.query_norm(ops, q) if self.query_norm else q
        k = ops.add_bias(self.key_norm(ops, k), self.key_bias)
        if rope:
            k, q = (ops.rope(x, positions, rope, spec.head_dim) for x in (k, q))
        if self.config.pooled:
            k = ops.compress(k, gates, self.pool_bias, pools[0], self.config.pooled)
        ops.store_index(k, pools[-1], spec)
        ops.select_positions(q, w, pools[-1], spec)


@dataclass(frozen=True, kw_only=True)
class BlockIndexerConfig:
    """Sizes of a block indexer."""

    spec: IndexSpec
    rope: RopeSpec | None  # None: nothing is rotated
    pools: bool = False  # a block has one key
    eps: float  # of norms

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """Pools: of keys that are pooled, and of keys."""
        return (*([CompressSpec(self.spec.every, self.spec.head_dim)] if self.pools else []), self.spec)

    def build(self, weights: Weights, attention: str, rank: int, *, in_features: int) -> "BlockIndexer":
        """The indexer of the layer whose tensor names begin with `attention`; its queries read `rank` columns."""
        name, dim, eps = f"{attention}.indexer", self.spec.head_dim, self.eps
        return BlockIndexer(
            query=weights.linear(f"{name}.q_proj", self.spec.num_heads * dim, rank),
            key=weights.linear(f"{name}.k_proj", dim, in_features),
            query_norm=weights.norm(f"{name}.q_norm", dim, eps),
            key_norm=weights.norm(f"{name}.k_norm", dim, eps),
            zeros=weights.zeros(self.spec.every * dim),
            ones=weights.ones(self.spec.num_heads),
            config=self,
        )


@dataclass(frozen=True)
class BlockIndexer:
    """The block indexer of a layer: selects blocks of positions for each row; formula in the module's docstring."""

    query: Linear
    key: Linear
    query_norm: RMSNorm
    key_norm: RMSNorm
    zeros: Weight  # gates of pools [every * dim]
    ones: Weight  # weights of heads
    config: BlockIndexerConfig

    def project(self, ops: Ops, x: Buffer) -> tuple[Buffer, ...]:
        """Rows [R, H] -> keys before norm and rope; recorded beside the other matrices over x."""
        return (self.key(ops, x),)

    def __call__(
        self, ops: Ops, projected: tuple[Buffer, ...], queries: Buffer, positions: Buffer, pools: tuple[Pool, ...]
    ) -> None:
        """Stores the keys of `project` in the pools of `kv_specs` and selects blocks. `queries`: what the queries read
        [R, rank]."""
        spec, rope, pool = self.config.spec, self.config.rope, pools[-1]
        q, k = self.query(ops, queries), projected[0]
        if self.config.pools:
            self._select_pools(ops, q, k, positions, pools)
            return
        q, k = self.query_norm(ops, q), self.key_norm(ops, k)
        if rope:
            q, k = (ops.rope(x, positions, rope, spec.head_dim) for x in (q, k))
        ops.store_index(k, pool, spec)
        ops.select_blocks(q, pool, spec)

    def _select_pools(self, ops: Ops, q: Buffer, k: Buffer, positions: Buffer, pools: tuple[Pool, ...]) -> None:
        spec, rope = self.config.spec, self.config.rope
        q = self.query_norm(ops, q)
        equal = ops.scale(k, 0.0)  # gates, so that the pooled key is the mean
        k = self.key_norm(ops, ops.compress(k, equal, self.zeros, pools[0], CompressSpec(spec.every, spec.head_dim)))
        if rope:
            q = ops.rope(q, positions, rope, spec.head_dim)
            k = ops.rope(k, positions, replace(rope, shift=spec.every - 1), spec.head_dim)
        ops.store_index(k, pools[1], spec)
        weights = ops.add_bias(ops.scale(ops.columns(q, 0, spec.num_heads), 0.0), self.ones)
        ops.select_positions(q, weights, pools[1], spec)
