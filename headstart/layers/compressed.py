"""Compressed attention (DeepSeek-V4 report, section 2.3; formulas: transformers, `models/deepseek_v4` of 5.23 and
`models/deepseek_v41` of 0a2080b4).

All heads share one key, which is also the value. A row attends to the keys of a window and to compressed entries of
the positions before it, one entry per `every` positions: to all entries, or to those that an indexer selects. Queries
and outputs have low ranks, outputs in groups of heads.

An entry is a weighted sum of the projections c of its positions. The weights are a softmax, by feature, over gates
z + b, where b depends on the place among the `every` positions. With `overlap` the first part of the features comes
from the positions before. The entry is normed, rotated like the first of its positions and stored at the last one, so a
row sees only entries whose positions are all computed. Values are rotated with the keys, so the output is rotated back.

In DeepSeek-V4.1 some layers read the entries of an earlier layer, and the last selection over its index keys. These
keys are norm(W entry), of an entry before its rotation. Gates have no b; an entry of one position is norm(c).

Canonical tensors under `{layer}.self_attn`: `q_a_proj`, `q_a_norm`, `q_b_proj`, `kv_proj`, `kv_norm`, `sinks` [heads],
`o_a_proj` [groups * rank, heads * head_dim / groups], `o_b_proj`; under `compressor`, and `indexer.compressor`:
`kv_proj`, `gate_proj`, `position_bias` [every, ...], `kv_norm`; `indexer.q_b_proj`, `indexer.weights_proj`, and in
V4.1 `indexer.k_proj`, `indexer.k_norm`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from headstart.kernels.ops import AttentionSpec, Buffer, KVSpec, Ops, Pool, RawTensor, Weight
from headstart.kernels.specs import CompressSpec, IndexSpec, RopeSpec
from headstart.layers.costs import MixerCost
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.parts import Mixer, MixerConfig, split_pools
from headstart.layers.weights import Weights


@dataclass(frozen=True, kw_only=True)
class CompressorConfig:
    """A compressor of keys, or of an indexer's keys."""

    spec: CompressSpec
    rope: RopeSpec
    biased: bool = True  # gates have a bias by place

    @property
    def gated(self) -> bool:
        """False for entries of one position, which need no gates and no pool of projections."""
        return self.spec.every > 1

    def build(self, weights: Weights, name: str, *, eps: float, in_features: int) -> Compressor:
        """Builds it from the tensors under `name`."""
        spec, width, size = self.spec, self.spec.width, self.spec.every * self.spec.width
        values = weights.linear(f"{name}.kv_proj", width, in_features)
        gates = weights.linear(f"{name}.gate_proj", width, in_features) if self.gated else None
        bias = weights.raw(f"{name}.position_bias", (spec.every, width)) if self.biased else None
        return Compressor(
            values=values,
            gates=gates,
            bias=weights.take(lambda: bias.shaped(size)) if bias else weights.zeros(size),
            norm=weights.norm(f"{name}.kv_norm", spec.dim, eps),
            spec=spec,
            rope=replace(self.rope, shift=spec.every - 1),
        )


@dataclass(frozen=True)
class Compressor:
    """Computes the entries whose last position is a row."""

    values: Linear
    gates: Linear | None  # None: an entry has one position
    bias: Weight
    norm: RMSNorm
    spec: CompressSpec
    rope: RopeSpec  # shifted to the first position of an entry

    def project(self, ops: Ops, x: Buffer) -> tuple[Buffer, ...]:
        """Rows [R, H] -> projections, and gates if there are any; recorded beside the other matrices over x."""
        return (self.values(ops, x), *((self.gates(ops, x),) if self.gates else ()))

    def entries(self, ops: Ops, projected: tuple[Buffer, ...], pool: Pool) -> Buffer:
        """Entries [R, dim] before rope; only rows that are the last position of an entry are meaningful."""
        values, *gates = projected
        return self.norm(ops, ops.compress(values, gates[0], self.bias, pool, self.spec) if gates else values)

    def rotated(self, ops: Ops, entries: Buffer, positions: Buffer, dim: int = 0) -> Buffer:
        """Entries, or index keys of `dim` features made of them, after rope."""
        return ops.rope(entries, positions, self.rope, dim or self.spec.dim)


@dataclass(frozen=True, kw_only=True)
class CompressedConfig(MixerConfig):
    """Compressed attention of one layer."""

    num_heads: int
    head_dim: int
    query_rank: int  # columns of the compressed queries
    groups: int  # of heads, for the output projection
    group_rank: int  # columns of each group's output
    window: int  # latest positions whose own keys a row reads
    block_window: bool = False  # see AttentionSpec; without entries only
    rope: RopeSpec  # rotates the last features of a head, in neighbouring pairs
    compressor: CompressorConfig | None = None  # None: attention over the window only
    # the indexer that selects entries, and the compressor of its keys; None: they are made of the entries
    index: tuple[IndexSpec, CompressorConfig | None] | None = None
    head_norm: bool = True  # the heads of queries are normed
    source_layer: int | None = None  # index of the earlier layer whose entries and index keys are read
    selects: bool = True  # the layer has the queries of its indexer; False: the last selection over the keys is used

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        return tuple(self.pool_specs.values())

    @property
    def pool_specs(self) -> dict[str, KVSpec]:
        """The layer's own pools, by name."""
        specs: dict[str, KVSpec] = {"window": self.attention_spec}
        if self.compressor and self.source_layer is None:
            specs |= {"projected": self.compressor.spec} if self.compressor.gated else {}
            specs["entries"] = self.attention_spec
            if self.index:
                keys, compressor = self.index
                specs |= {"index_projected": compressor.spec} if compressor else {}
                specs["index"] = keys
        return specs

    def pools(self, pool: Pool) -> dict[str, Pool]:
        """The pools of a mixer's argument `pool` by name, those of the source layer included."""
        own = split_pools(pool)
        if self.source_layer is None:
            return dict(zip(self.pool_specs, own, strict=False))  # those of a memory may follow
        return replace(self, source_layer=None).pools(own[1]) | {"window": own[0]}

    @property
    def num_kernels(self) -> int:
        return 24 if self.compressor else 12

    def cost(self, weights: int, source: MixerConfig | None = None) -> MixerCost:
        """See MixerConfig.cost. A layer with a source stores no entries; if it selects, it reads index keys."""
        cost = super().cost(weights, source)
        if source is None:
            return cost
        index = self.index[0] if self.index and self.selects else None
        return replace(
            cost, entries_stored=False, index_width=index.head_dim if index else 0,
            index_work=index.num_heads * index.head_dim if index else 0,
        )  # fmt: skip

    @property
    def attention_spec(self) -> AttentionSpec:
        """Attention over keys or entries."""
        return AttentionSpec(
            self.num_heads, 1, self.head_dim, self.head_dim**-0.5, self.head_dim, latent=True, window=self.window,
            block_window=self.block_window,
        )  # fmt: skip

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, in_features: int) -> CompressedAttention:
        """See MixerConfig.build."""
        name, wide, inner = f"{prefix}.self_attn", self.num_heads * self.head_dim, self.groups * self.group_rank
        query_down = weights.linear(f"{name}.q_a_proj", self.query_rank, in_features)
        query = weights.linear(f"{name}.q_b_proj", wide, self.query_rank)
        key = weights.linear(f"{name}.kv_proj", self.head_dim, in_features)
        down = weights.raw(f"{name}.o_a_proj.weight", (inner, wide // self.groups))

        def of_groups() -> Iterator[RawTensor]:
            rows = np.arange(self.group_rank)
            return (down.take_rows(rows + first).plain() for first in range(0, inner, self.group_rank))

        return CompressedAttention(
            query_down=query_down,
            query=query,
            key=key,
            output_down=weights.take_each(of_groups, precise=True),
            output=weights.linear(f"{name}.o_b_proj", hidden, inner),
            query_norm=weights.norm(f"{name}.q_a_norm", self.query_rank, eps),
            head_norm=weights.unweighted_norm(self.head_dim, eps) if self.head_norm else None,
            key_norm=weights.norm(f"{name}.kv_norm", self.head_dim, eps),
            sinks=weights.get(f"{name}.sinks", self.num_heads),
            config=self,
            compressor=self.compressor.build(weights, f"{name}.compressor", eps=eps, in_features=in_features)
            if self.compressor and self.source_layer is None
            else None,
            indexer=self._indexer(weights, f"{name}.indexer", eps, in_features),
        )

    def _indexer(self, weights: Weights, name: str, eps: float, in_features: int) -> EntryIndexer | None:
        if self.index is None or not self.selects:
            return None
        spec, compressor = self.index
        of_entries = compressor is None and self.source_layer is None
        return EntryIndexer(
            key=weights.linear(f"{name}.k_proj", spec.head_dim, self.head_dim) if of_entries else None,
            key_norm=weights.norm(f"{name}.k_norm", spec.head_dim, eps) if of_entries else None,
            compressor=compressor.build(weights, f"{name}.compressor", eps=eps, in_features=in_features)
            if compressor
            else None,
            query=weights.linear(f"{name}.q_b_proj", spec.num_heads * spec.head_dim, self.query_rank),
            weights=Linear(weights.get(f"{name}.weights_proj.weight", spec.num_heads, in_features, precise=True)),
            spec=spec,
            rope=self.rope,
        )


@dataclass(frozen=True)
class EntryIndexer:
    """Selects entries by index keys (see layers/indexer.py)."""

    query: Linear
    weights: Linear
    compressor: Compressor | None  # of the keys; None: they are made of the layer's entries, or the source layer's
    key: Linear | None
    key_norm: RMSNorm | None
    spec: IndexSpec
    rope: RopeSpec

    def project(self, ops: Ops, x: Buffer) -> tuple[Buffer, ...]:
        """Rows [R, H] -> weights, and the projections of the compressor; recorded beside the other matrices over x."""
        projected = self.compressor.project(ops, x) if self.compressor else ()
        return (self.weights(ops, x), *projected)

    def keys(
        self, ops: Ops, projected: tuple[Buffer, ...], entries: Buffer, positions: Buffer, pool: Pool,
        compressor: Compressor,
    ) -> Buffer:  # fmt: skip
        """Keys [R, dim] of own projections, or of the entries (before rope) of the layer's `compressor`."""
        if self.compressor:
            return self.compressor.rotated(ops, self.compressor.entries(ops, projected, pool), positions)
        assert self.key and self.key_norm
        return compressor.rotated(ops, self.key_norm(ops, self.key(ops, entries)), positions, self.spec.head_dim)


@dataclass(frozen=True)
class CompressedAttention(Mixer):
    """Compressed attention; pools as in CompressedConfig.pools."""

    query_down: Linear
    query_norm: RMSNorm
    query: Linear
    head_norm: RMSNorm | None
    key: Linear
    key_norm: RMSNorm
    output_down: tuple[Weight, ...]
    output: Linear
    sinks: Weight
    config: CompressedConfig
    compressor: Compressor | None  # None: there are no entries, or the source layer's
    indexer: EntryIndexer | None

    def store(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> None:
        """Stores keys of rows without queries, in a layer without entries."""
        self._store(ops, self.key(ops, x), positions, pool)

    def _store(self, ops: Ops, key: Buffer, positions: Buffer, pool: Pool) -> None:
        config = self.config
        key = ops.rope(self.key_norm(ops, key), positions, config.rope, config.head_dim)
        ops.store_kv(key, key, pool, config.attention_spec)

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        config, spec, rope = self.config, self.config.attention_spec, self.config.rope
        pools = config.pools(pool)
        down, key = self.query_down(ops, x), self.key(ops, x)
        projected = self.compressor.project(ops, x) if self.compressor else ()
        weights, *of_keys = self.indexer.project(ops, x) if self.indexer else (None,)
        queries = self.query_norm(ops, down)
        q = self.query(ops, queries)
        q = ops.rope(self.head_norm(ops, q) if self.head_norm else q, positions, rope, config.head_dim)
        self._store(ops, key, positions, pools["window"])
        if config.compressor is None:
            attended = ops.attend(q, pools["window"], spec, self.sinks)
        else:
            if self.compressor:
                entries = self.compressor.entries(ops, projected, pools.get("projected"))
                rotated = self.compressor.rotated(ops, entries, positions)
                ops.store_kv(rotated, rotated, pools["entries"], spec)
                if self.indexer:
                    made = tuple(of_keys), entries, positions, pools.get("index_projected"), self.compressor
                    ops.store_index(self.indexer.keys(ops, *made), pools["index"], self.indexer.spec)
            if self.indexer:
                wanted = self.indexer.query(ops, queries)
                wanted = ops.rope(wanted, positions, self.indexer.rope, self.indexer.spec.head_dim)
                ops.select_positions(wanted, weights, pools["index"], self.indexer.spec)
            attended = ops.attend_compressed(
                q, pools["window"], pools["entries"], spec, config.compressor.spec.every, self.sinks, pools.get("index")
            )
        unrotated = ops.rope(attended, positions, replace(rope, inverse=True), config.head_dim)
        return self.output(ops, ops.head_linear(unrotated, self.output_down))
