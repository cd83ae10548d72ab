"""Compressed attention (DeepSeek-V4 report, section 2.3): one key that is its own value for all heads, over a window;
and beside it one entry for every `every` positions, made of their projections, all of them or those that an indexer
chooses. Queries and outputs go through low ranks, outputs in groups of heads.

An entry is w-summed from projections c of its window's positions, with softmax weights by feature over gates z + b (b
by the place in the window); with `overlap` a first part of the features comes from the window before. It is normed,
rotated as the first position of its window, and kept at the last: a row sees the entries of windows that have ended.
Values were rotated with the keys, so the output is turned back. Formula: transformers 5.23, `models/deepseek_v4`.

Canonical tensors under `{layer}.self_attn`: `q_a_proj`, `q_a_norm`, `q_b_proj`, `kv_proj`, `kv_norm`, `sinks` [heads],
`o_a_proj` [groups * rank, heads * head_dim / groups], `o_b_proj`; under `compressor`, and `indexer.compressor`:
`kv_proj`, `gate_proj`, `position_bias` [every, ...], `kv_norm`; `indexer.q_b_proj`, `indexer.weights_proj`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headstart.kernels.indexing import CompressSpec, IndexSpec
from headstart.kernels.ops import AttentionSpec, Buffer, KVSpec, Ops, Pool, Weight
from headstart.kernels.specs import RopeSpec
from headstart.kernels.states import StateSpec
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.weights import Shapes, Weights


@dataclass(frozen=True, kw_only=True)
class CompressorConfig:
    """`rope`: of positions; entries are rotated as the first one of their window."""

    spec: CompressSpec
    rope: RopeSpec

    def build(self, weights: Weights, name: str, *, eps: float, reads: int) -> Compressor:
        """From the tensors under `name`."""
        spec, width = self.spec, self.spec.width
        bias = weights.raw(f"{name}.position_bias", (spec.every, width)).shaped(spec.every * width)
        return Compressor(
            values=weights.linear(f"{name}.kv_proj", width, reads),
            gates=weights.linear(f"{name}.gate_proj", width, reads),
            bias=weights.take(bias),
            norm=weights.norm(f"{name}.kv_norm", spec.dim, eps),
            spec=spec,
            rope=replace(self.rope, behind=spec.every - 1),
        )

    def shapes(self, name: str, *, reads: int) -> Shapes:
        """Names and shapes of what `build` takes."""
        width = self.spec.width
        return {
            f"{name}.kv_proj.weight": (width, reads),
            f"{name}.gate_proj.weight": (width, reads),
            f"{name}.position_bias": (self.spec.every, width),
            f"{name}.kv_norm.weight": (self.spec.dim,),
        }


@dataclass(frozen=True)
class Compressor:
    """Entries of the windows that end at a row."""

    values: Linear
    gates: Linear
    bias: Weight
    norm: RMSNorm
    spec: CompressSpec
    rope: RopeSpec

    def project(self, ops: Ops, x: Buffer) -> tuple[Buffer, Buffer]:
        """What is kept of rows [R, H]: beside other matrices over x."""
        return self.values(ops, x), self.gates(ops, x)

    def __call__(self, ops: Ops, kept: tuple[Buffer, Buffer], positions: Buffer, pool: Pool) -> Buffer:
        """-> [R, dim], normed and rotated; of rows that end no window it means nothing."""
        entries = self.norm(ops, ops.compress(*kept, self.bias, pool, self.spec))
        return ops.rope(entries, positions, self.rope, self.spec.dim)


@dataclass(frozen=True, kw_only=True)
class CompressedConfig:
    """Sizes. `window`: positions whose own keys a row sees; `rope` turns the last features of a head, by neighbours.
    `compressor` None: nothing beside the window; `index`: the indexer that chooses entries, and its compressor."""

    num_heads: int
    head_dim: int
    query_rank: int
    groups: int
    group_rank: int
    window: int
    rope: RopeSpec
    compressor: CompressorConfig | None = None
    index: tuple[IndexSpec, CompressorConfig] | None = None

    @property
    def spec(self) -> AttentionSpec:
        """What is kept of a position, and how it is read."""
        return AttentionSpec(
            self.num_heads, 1, self.head_dim, self.head_dim**-0.5, self.head_dim, latent=True, window=self.window
        )

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, reads: int) -> CompressedAttention:
        """The attention of the layer `prefix`, which reads as many columns as `reads`."""
        name, wide = f"{prefix}.self_attn", self.num_heads * self.head_dim
        down = weights.raw(f"{name}.o_a_proj.weight", (self.groups * self.group_rank, wide // self.groups))
        rows = np.arange(self.groups * self.group_rank).reshape(self.groups, self.group_rank)
        return CompressedAttention(
            query_down=weights.linear(f"{name}.q_a_proj", self.query_rank, reads),
            query_norm=weights.norm(f"{name}.q_a_norm", self.query_rank, eps),
            query=weights.linear(f"{name}.q_b_proj", wide, self.query_rank),
            head_norm=weights.plain_norm(self.head_dim, eps),
            key=weights.linear(f"{name}.kv_proj", self.head_dim, reads),
            key_norm=weights.norm(f"{name}.kv_norm", self.head_dim, eps),
            output_down=tuple(weights.take(down.take_rows(each).plain(), precise=True) for each in rows),
            output=weights.linear(f"{name}.o_b_proj", hidden, self.groups * self.group_rank),
            sinks=weights.get(f"{name}.sinks", self.num_heads),
            config=self,
            compressor=self.compressor.build(weights, f"{name}.compressor", eps=eps, reads=reads)
            if self.compressor
            else None,
            indexer=self._indexer(weights, f"{name}.indexer", eps, reads),
        )

    def _indexer(self, weights: Weights, name: str, eps: float, reads: int) -> EntryIndexer | None:
        if self.index is None:
            return None
        spec, compressor = self.index
        return EntryIndexer(
            query=weights.linear(f"{name}.q_b_proj", spec.num_heads * spec.head_dim, self.query_rank),
            weights=Linear(weights.get(f"{name}.weights_proj.weight", spec.num_heads, reads, precise=True)),
            compressor=compressor.build(weights, f"{name}.compressor", eps=eps, reads=reads),
            spec=spec,
            rope=compressor.rope,
        )

    def shapes(self, prefix: str, hidden: int, *, reads: int) -> Shapes:
        """Names and shapes of what `build` takes."""
        name, wide = f"{prefix}.self_attn", self.num_heads * self.head_dim
        matrices = {
            "q_a_proj": (self.query_rank, reads),
            "q_b_proj": (wide, self.query_rank),
            "kv_proj": (self.head_dim, reads),
            "o_a_proj": (self.groups * self.group_rank, wide // self.groups),
            "o_b_proj": (hidden, self.groups * self.group_rank),
        }
        shapes: Shapes = {f"{name}.{part}.weight": shape for part, shape in matrices.items()}
        shapes |= {f"{name}.q_a_norm.weight": (self.query_rank,), f"{name}.kv_norm.weight": (self.head_dim,)}
        shapes[f"{name}.sinks"] = (self.num_heads,)
        if self.compressor:
            shapes |= self.compressor.shapes(f"{name}.compressor", reads=reads)
        if self.index:
            spec, compressor = self.index
            shapes |= compressor.shapes(f"{name}.indexer.compressor", reads=reads)
            shapes[f"{name}.indexer.q_b_proj.weight"] = (spec.num_heads * spec.head_dim, self.query_rank)
            shapes[f"{name}.indexer.weights_proj.weight"] = (spec.num_heads, reads)
        return shapes


@dataclass(frozen=True)
class EntryIndexer:
    """Scores entries by smaller ones of its own (see layers.indexer)."""

    query: Linear
    weights: Linear
    compressor: Compressor
    spec: IndexSpec
    rope: RopeSpec


@dataclass(frozen=True)
class CompressedAttention:
    """See the module. Its pools: of keys; of projections and of entries; of the indexer's projections and entries."""

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
    shares: None = None

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        own: tuple[KVSpec, ...] = (self.config.spec,)
        if self.compressor:
            own += (self.compressor.spec, self.config.spec)
        return own + ((self.indexer.compressor.spec, self.indexer.spec) if self.indexer else ())

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return ()

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        config, spec, rope = self.config, self.config.spec, self.config.rope
        down, key = self.query_down(ops, x), self.key(ops, x)
        kept = self.compressor.project(ops, x) if self.compressor else None
        index = (*self.indexer.compressor.project(ops, x), self.indexer.weights(ops, x)) if self.indexer else None
        queries = self.query_norm(ops, down)
        q = ops.rope(self.head_norm(ops, self.query(ops, queries)), positions, rope, config.head_dim)
        key = ops.rope(self.key_norm(ops, key), positions, rope, config.head_dim)
        own = pool if self.compressor is None else pool[0]
        ops.store_kv(key, key, own, spec)
        if self.compressor is None or kept is None:
            attended = ops.attend(q, own, spec, self.sinks)
        else:
            entries = self.compressor(ops, kept, positions, pool[1])
            ops.store_kv(entries, entries, pool[2], spec)
            if self.indexer and index:
                self._choose(ops, self.indexer, queries, index, positions, pool)
            chosen = pool[4] if self.indexer else None
            attended = ops.attend_beside(q, own, pool[2], spec, self.compressor.spec.every, self.sinks, chosen)
        turned = ops.rope(attended, positions, replace(rope, inverse=True), config.head_dim)
        return self.output(ops, ops.head_linear(turned, self.output_down))

    def _choose(
        self, ops: Ops, indexer: EntryIndexer, queries: Buffer, kept: tuple[Buffer, ...], positions: Buffer, pool: Pool
    ) -> None:
        values, gates, weights = kept
        q = ops.rope(indexer.query(ops, queries), positions, indexer.rope, indexer.spec.head_dim)
        ops.store_index(indexer.compressor(ops, (values, gates), positions, pool[3]), pool[4], indexer.spec)
        ops.choose(q, weights, pool[4], indexer.spec)
