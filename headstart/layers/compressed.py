"""Compressed attention (DeepSeek-V4 report, section 2.3; formula: transformers 5.23, `models/deepseek_v4`).

All heads share one key, which is also the value. A row attends to the keys of a window and to compressed entries of
the positions before it, one entry per `every` positions: to all entries, or to those that an indexer selects. Queries
and outputs have low ranks, outputs in groups of heads.

An entry is a weighted sum of the projections c of its positions. The weights are a softmax, by feature, over gates
z + b, where b depends on the place among the `every` positions. With `overlap` the first part of the features comes
from the positions before. The entry is normed, rotated like the first of its positions and stored at the last one, so a
row sees only entries whose positions are all computed. Values are rotated with the keys, so the output is rotated back.

Canonical tensors under `{layer}.self_attn`: `q_a_proj`, `q_a_norm`, `q_b_proj`, `kv_proj`, `kv_norm`, `sinks` [heads],
`o_a_proj` [groups * rank, heads * head_dim / groups], `o_b_proj`; under `compressor`, and `indexer.compressor`:
`kv_proj`, `gate_proj`, `position_bias` [every, ...], `kv_norm`; `indexer.q_b_proj`, `indexer.weights_proj`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headstart.kernels.ops import AttentionSpec, Buffer, KVSpec, Ops, Pool, Weight
from headstart.kernels.specs import CompressSpec, IndexSpec, RopeSpec
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.parts import Mixer, MixerConfig
from headstart.layers.weights import Shapes, Weights


@dataclass(frozen=True, kw_only=True)
class CompressorConfig:
    """A compressor of keys, or of an indexer's keys."""

    spec: CompressSpec
    rope: RopeSpec

    def build(self, weights: Weights, name: str, *, eps: float, in_features: int) -> Compressor:
        """Builds it from the tensors under `name`."""
        spec, width = self.spec, self.spec.width
        bias = weights.raw(f"{name}.position_bias", (spec.every, width)).shaped(spec.every * width)
        return Compressor(
            values=weights.linear(f"{name}.kv_proj", width, in_features),
            gates=weights.linear(f"{name}.gate_proj", width, in_features),
            bias=weights.take(bias),
            norm=weights.norm(f"{name}.kv_norm", spec.dim, eps),
            spec=spec,
            rope=replace(self.rope, shift=spec.every - 1),
        )

    def shapes(self, name: str, *, in_features: int) -> Shapes:
        """Names and shapes of what `build` takes."""
        width = self.spec.width
        return {
            f"{name}.kv_proj.weight": (width, in_features),
            f"{name}.gate_proj.weight": (width, in_features),
            f"{name}.position_bias": (self.spec.every, width),
            f"{name}.kv_norm.weight": (self.spec.dim,),
        }


@dataclass(frozen=True)
class Compressor:
    """Computes the entries whose last position is a row."""

    values: Linear
    gates: Linear
    bias: Weight
    norm: RMSNorm
    spec: CompressSpec
    rope: RopeSpec  # shifted to the first position of an entry

    def project(self, ops: Ops, x: Buffer) -> tuple[Buffer, Buffer]:
        """Rows [R, H] -> (projections, gates); recorded beside the other matrices over x."""
        return self.values(ops, x), self.gates(ops, x)

    def __call__(self, ops: Ops, projected: tuple[Buffer, Buffer], positions: Buffer, pool: Pool) -> Buffer:
        """Entries [R, dim] after norm and rope; only rows that are the last position of an entry are meaningful."""
        entries = self.norm(ops, ops.compress(*projected, self.bias, pool, self.spec))
        return ops.rope(entries, positions, self.rope, self.spec.dim)


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
    index: tuple[IndexSpec, CompressorConfig] | None = None  # the indexer that selects entries, and its compressor

    @property
    def attention_spec(self) -> AttentionSpec:
        return self.spec

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """Pools of keys; of projections and entries; of the indexer's projections and entries."""
        specs: tuple[KVSpec, ...] = (self.spec,)
        if self.compressor:
            specs += (self.compressor.spec, self.spec)
        return specs + ((self.index[1].spec, self.index[0]) if self.index else ())

    @property
    def num_kernels(self) -> int:
        return 24 if self.compressor else 12

    @property
    def spec(self) -> AttentionSpec:
        """Attention over keys or entries."""
        return AttentionSpec(
            self.num_heads, 1, self.head_dim, self.head_dim**-0.5, self.head_dim, latent=True, window=self.window,
            block_window=self.block_window,
        )  # fmt: skip

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, in_features: int) -> CompressedAttention:
        """See MixerConfig.build."""
        name, wide = f"{prefix}.self_attn", self.num_heads * self.head_dim
        down = weights.raw(f"{name}.o_a_proj.weight", (self.groups * self.group_rank, wide // self.groups))
        rows = np.arange(self.groups * self.group_rank).reshape(self.groups, self.group_rank)
        return CompressedAttention(
            query_down=weights.linear(f"{name}.q_a_proj", self.query_rank, in_features),
            query_norm=weights.norm(f"{name}.q_a_norm", self.query_rank, eps),
            query=weights.linear(f"{name}.q_b_proj", wide, self.query_rank),
            head_norm=weights.unweighted_norm(self.head_dim, eps),
            key=weights.linear(f"{name}.kv_proj", self.head_dim, in_features),
            key_norm=weights.norm(f"{name}.kv_norm", self.head_dim, eps),
            output_down=tuple(weights.take(down.take_rows(each).plain(), precise=True) for each in rows),
            output=weights.linear(f"{name}.o_b_proj", hidden, self.groups * self.group_rank),
            sinks=weights.get(f"{name}.sinks", self.num_heads),
            config=self,
            compressor=self.compressor.build(weights, f"{name}.compressor", eps=eps, in_features=in_features)
            if self.compressor
            else None,
            indexer=self._indexer(weights, f"{name}.indexer", eps, in_features),
        )

    def _indexer(self, weights: Weights, name: str, eps: float, in_features: int) -> EntryIndexer | None:
        if self.index is None:
            return None
        spec, compressor = self.index
        return EntryIndexer(
            query=weights.linear(f"{name}.q_b_proj", spec.num_heads * spec.head_dim, self.query_rank),
            weights=Linear(weights.get(f"{name}.weights_proj.weight", spec.num_heads, in_features, precise=True)),
            compressor=compressor.build(weights, f"{name}.compressor", eps=eps, in_features=in_features),
            spec=spec,
            rope=compressor.rope,
        )

    def shapes(self, prefix: str, hidden: int, *, in_features: int) -> Shapes:
        """Names and shapes of what `build` takes."""
        name, wide = f"{prefix}.self_attn", self.num_heads * self.head_dim
        matrices = {
            "q_a_proj": (self.query_rank, in_features),
            "q_b_proj": (wide, self.query_rank),
            "kv_proj": (self.head_dim, in_features),
            "o_a_proj": (self.groups * self.group_rank, wide // self.groups),
            "o_b_proj": (hidden, self.groups * self.group_rank),
        }
        shapes: Shapes = {f"{name}.{part}.weight": shape for part, shape in matrices.items()}
        shapes |= {f"{name}.q_a_norm.weight": (self.query_rank,), f"{name}.kv_norm.weight": (self.head_dim,)}
        shapes[f"{name}.sinks"] = (self.num_heads,)
        if self.compressor:
            shapes |= self.compressor.shapes(f"{name}.compressor", in_features=in_features)
        if self.index:
            spec, compressor = self.index
            shapes |= compressor.shapes(f"{name}.indexer.compressor", in_features=in_features)
            shapes[f"{name}.indexer.q_b_proj.weight"] = (spec.num_heads * spec.head_dim, self.query_rank)
            shapes[f"{name}.indexer.weights_proj.weight"] = (spec.num_heads, in_features)
        return shapes


@dataclass(frozen=True)
class EntryIndexer:
    """Selects entries by smaller entries of its own (see layers/indexer.py)."""

    query: Linear
    weights: Linear
    compressor: Compressor
    spec: IndexSpec
    rope: RopeSpec

    def __call__(
        self, ops: Ops, queries: Buffer, projected: tuple[Buffer, ...], positions: Buffer, compressor_pool: Pool,
        pool: Pool,
    ) -> None:  # fmt: skip
        """Stores the entries of `projected` and selects entries for each row."""
        values, gates, weights = projected
        q = ops.rope(self.query(ops, queries), positions, self.rope, self.spec.head_dim)
        ops.store_index(self.compressor(ops, (values, gates), positions, compressor_pool), pool, self.spec)
        ops.select_positions(q, weights, pool, self.spec)


@dataclass(frozen=True)
class CompressedAttention(Mixer):
    """Compressed attention; pools as in CompressedConfig.kv_specs."""

    query_down: Linear
    query_norm: RMSNorm
    query: Linear
    head_norm: RMSNorm
    key: Linear
    key_norm: RMSNorm
    output_down: tuple[Weight, ...]
    output: Linear
    sinks: Weight
    config: CompressedConfig
    compressor: Compressor | None
    indexer: EntryIndexer | None

    def store(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> None:
        """Stores keys of rows without queries, in a layer without entries."""
        self._store(ops, self.key(ops, x), positions, pool)

    def _store(self, ops: Ops, key: Buffer, positions: Buffer, pool: Pool) -> None:
        config = self.config
        key = ops.rope(self.key_norm(ops, key), positions, config.rope, config.head_dim)
        ops.store_kv(key, key, pool, config.spec)

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        config, spec, rope = self.config, self.config.spec, self.config.rope
        down, key = self.query_down(ops, x), self.key(ops, x)
        projected = self.compressor.project(ops, x) if self.compressor else None
        index = (*self.indexer.compressor.project(ops, x), self.indexer.weights(ops, x)) if self.indexer else None
        queries = self.query_norm(ops, down)
        q = ops.rope(self.head_norm(ops, self.query(ops, queries)), positions, rope, config.head_dim)
        window_pool = pool if self.compressor is None else pool[0]
        self._store(ops, key, positions, window_pool)
        if self.compressor is None or projected is None:
            attended = ops.attend(q, window_pool, spec, self.sinks)
        else:
            entries, every = self.compressor(ops, projected, positions, pool[1]), self.compressor.spec.every
            ops.store_kv(entries, entries, pool[2], spec)
            selected = None
            if self.indexer and index:
                selected = pool[4]
                self.indexer(ops, queries, index, positions, pool[3], selected)
            attended = ops.attend_compressed(q, window_pool, pool[2], spec, every, self.sinks, selected)
        unrotated = ops.rope(attended, positions, replace(rope, inverse=True), config.head_dim)
        return self.output(ops, ops.head_linear(unrotated, self.output_down))
