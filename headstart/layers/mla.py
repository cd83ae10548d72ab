"""Multi-head latent attention (MLA; DeepSeek-V2 report, section 2.1) in its absorbed form, for every row.

All heads share one latent c = norm(W_c x) and one rotated key k_r per position. With W_K and W_V the parts of kv_b_proj
that expand c for a head, q . k = (W_K^T q_nope) . c + q_r . k_r, and the head's output is W_V times the weighted sum of
latents. This is grouped-query attention with one kv head, whose values are the first part of its keys.

The rotated features may be left as they are (Kimi Linear) or missing (GLM-5.3); heads may have sinks, and gates on
their outputs. With an indexer (layers/indexer.py) a row attends to the selected positions only. A layer without an
indexer may use the selection of an earlier layer.

Canonical tensors under `{layer}.self_attn`: `q_proj` or `q_a_proj`, `q_a_layernorm`, `q_b_proj`; `kv_a_proj_with_mqa`,
`kv_a_layernorm`; `kv_b_proj`, or its parts `k_b_proj` [heads, latent, nope] and `v_b_proj` [heads, value, latent];
`o_proj`, `gate_proj`, `sinks` [heads].
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from headstart.kernels.ops import AttentionSpec, Buffer, KVSpec, Ops, Pool, RawTensor, RopeSpec, Weight
from headstart.layers.indexer import Indexer, IndexerConfig
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.parts import Mixer, MixerConfig
from headstart.layers.rope import half_split
from headstart.layers.weights import Weights


@dataclass(frozen=True, kw_only=True)
class MLAConfig(MixerConfig):
    """Multi-head latent attention of one layer."""

    num_heads: int
    query_rank: int  # columns of the compressed queries; 0: queries come from x directly
    latent: int  # columns of the latent (kv_lora_rank)
    nope: int  # unrotated features of a query
    rotary: int  # rotated features of a query
    value: int  # features of a value
    rope: RopeSpec | None  # None: nothing is rotated
    scale: float
    eps: float = 1e-6  # of the two inner norms
    interleaved: bool = True  # the file stores the two features of a rotary pair next to each other
    bias: bool = False
    latent_scale: float = 1.0  # multiplies the latent after its norm
    indexer: IndexerConfig | None = None
    source_layer: int | None = None  # index of the earlier layer whose indexer selects positions
    num_gates: int = 0  # the output is multiplied by sigmoid(gate_proj x): a gate by head or by feature; 0: none
    sinks: bool = False  # see Ops.attend

    def sharing(self, source: int | None) -> "MLAConfig":
        """This attention with the selection of layer `source` in place of its own indexer; None: itself."""
        return self if source is None else replace(self, indexer=None, source_layer=source)

    @property
    def attention_spec(self) -> AttentionSpec:
        """Attention over latents: one kv head, values are the first part of the keys."""
        return AttentionSpec(self.num_heads, 1, self.latent + self.rotary, self.scale, self.latent, latent=True)

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """Pools of latents, then of the indexer's keys."""
        return (self.attention_spec, *(self.indexer.kv_specs if self.indexer else ()))

    @property
    def num_kernels(self) -> int:
        return 18 if self.indexer else 12

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, in_features: int) -> "MLA":
        """See MixerConfig.build."""
        heads, rank, per_head = self.num_heads, self.query_rank, self.nope + self.rotary
        attn, width = f"{prefix}.self_attn", self.latent + self.rotary
        query_down = weights.get(f"{attn}.q_a_proj.weight", rank, in_features) if rank else None
        name, query_inputs = ("q_b_proj", rank) if rank else ("q_proj", in_features)
        queries = weights.raw(f"{attn}.{name}.weight", (heads * per_head, query_inputs))
        latents = weights.raw(f"{attn}.kv_a_proj_with_mqa.weight", (width, in_features))
        keys, values = _absorbed(weights, attn, self)
        output = weights.get(f"{attn}.o_proj.weight", hidden, heads * self.value)
        gate = weights.linear(f"{attn}.gate_proj", self.num_gates, in_features) if self.num_gates else None
        down_bias = weights.get(f"{attn}.q_a_proj.bias", rank) if rank and self.bias else None
        bias = weights.raw(f"{attn}.kv_a_proj_with_mqa.bias", (width,)) if self.bias else None
        output_bias = weights.get(f"{attn}.o_proj.bias", hidden) if self.bias else None
        order = partial(half_split, self.rotary, interleaved=self.interleaved)

        def query_rows(features: NDArray[np.int64]) -> NDArray[np.int64]:
            return (np.arange(heads)[:, None] * per_head + features).reshape(-1)

        return MLA(
            latent=_rows(weights, latents, lambda: np.arange(self.latent), bias),
            latent_norm=_latent_norm(weights, f"{attn}.kv_a_layernorm.weight", self),
            key_rope=_rows(weights, latents, lambda: self.latent + order(), bias) if self.rotary else None,
            query_down=Linear(query_down, down_bias) if rank else None,
            query_norm=weights.norm(f"{attn}.q_a_layernorm", rank, self.eps) if rank else None,
            query=_rows(weights, queries, lambda: query_rows(np.arange(self.nope))),
            query_rope=_rows(weights, queries, lambda: query_rows(self.nope + order())) if self.rotary else None,
            absorb_key=keys,
            absorb_value=values,
            output=Linear(output, output_bias),
            config=self,
            gate=gate,
            sinks=weights.get(f"{attn}.sinks", heads) if self.sinks else None,
            indexer=self.indexer.build(weights, attn, rank, in_features=in_features) if self.indexer else None,
        )


@dataclass(frozen=True)
class MLA(Mixer):
    """Latent attention; `query_rope` and `key_rope` are the rotated parts of the projections."""

    query_down: Linear | None
    query_norm: RMSNorm | None
    query: Linear
    query_rope: Linear | None
    latent: Linear
    latent_norm: RMSNorm
    key_rope: Linear | None
    absorb_key: tuple[Weight, ...]  # of each head, [latent, nope]
    absorb_value: tuple[Weight, ...]  # of each head, [value, latent]
    output: Linear
    config: MLAConfig
    gate: Linear | None = None
    sinks: Weight | None = None
    indexer: Indexer | None = None

    def store(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> None:
        """Stores latents of rows without queries, in a layer without an indexer."""
        latent, key_rope = self.latent(ops, x), self.key_rope(ops, x) if self.key_rope else None
        self._store(ops, latent, key_rope, positions, pool)

    def _store(self, ops: Ops, latent: Buffer, key_rope: Buffer | None, positions: Buffer, pool: Pool) -> None:
        latent = self.latent_norm(ops, latent)
        key_rope = self._rotated(ops, key_rope, positions)
        key = latent if key_rope is None else ops.concat(latent, key_rope)
        ops.store_kv(key, latent, pool, self.config.attention_spec)

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        config = self.config
        latent_pool, index_pools = self._pools(pool)
        latent, key_rope = self.latent(ops, x), self.key_rope(ops, x) if self.key_rope else None
        gate = self.gate(ops, x) if self.gate else None
        indexed = self.indexer.project(ops, x) if self.indexer else None
        queries = x
        if self.query_down and self.query_norm:
            queries = self.query_norm(ops, self.query_down(ops, x))
        query, query_rope = self.query(ops, queries), self.query_rope(ops, queries) if self.query_rope else None
        if self.indexer and indexed:
            self.indexer(ops, indexed, queries, positions, index_pools)
        query_rope = self._rotated(ops, query_rope, positions)
        q = ops.head_linear(query, self.absorb_key)
        if query_rope is not None:
            q = ops.concat(q, query_rope, config.num_heads)
        self._store(ops, latent, key_rope, positions, latent_pool)
        chosen = index_pools[-1] if index_pools else None
        attended = ops.attend(q, latent_pool, config.attention_spec, self.sinks, chosen)
        values = ops.head_linear(attended, self.absorb_value)
        return self.output(ops, values if gate is None else ops.sigmoid_mul(gate, values))

    def _rotated(self, ops: Ops, x: Buffer | None, positions: Buffer) -> Buffer | None:
        rope = self.config.rope
        return x if x is None or rope is None else ops.rope(x, positions, rope, self.config.rotary)

    def _pools(self, pool: Pool) -> tuple[Pool, tuple[Pool, ...]]:
        """(pool of latents, pools of the indexer)."""
        if self.indexer:
            return pool[0], pool[1:]
        if self.config.source_layer is not None:
            latent_pool, (_, *index_pools) = pool
            return latent_pool, tuple(index_pools)
        return pool, ()


def _latent_norm(weights: Weights, name: str, config: MLAConfig) -> RMSNorm:
    weight = weights.raw(name, (config.latent,))
    factor = config.latent_scale
    return RMSNorm(weights.take(lambda: weight if factor == 1 else weight.affine(factor, 0)), config.eps)


def _rows(
    weights: Weights, weight: RawTensor, rows: Callable[[], NDArray[np.int64]], bias: RawTensor | None = None
) -> Linear:
    """Some rows of a projection."""
    taken = weights.take(lambda: weight.take_rows(rows()))
    return Linear(taken, weights.take(lambda: bias.take_rows(rows())) if bias else None)


def _absorbed(weights: Weights, prefix: str, config: MLAConfig) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """W_K^T [latent, nope] and W_V [value, latent] of each head, not quantized."""
    heads, latent, nope, value = config.num_heads, config.latent, config.nope, config.value
    if weights.has(f"{prefix}.k_b_proj.weight"):
        k = weights.raw(f"{prefix}.k_b_proj.weight", (heads, latent, nope))
        v = weights.raw(f"{prefix}.v_b_proj.weight", (heads, value, latent))
        keys = weights.take_each(lambda: (k.part(h).plain() for h in range(heads)), precise=True)
        return keys, weights.take_each(lambda: (v.part(h).plain() for h in range(heads)), precise=True)
    both = weights.raw(f"{prefix}.kv_b_proj.weight", (heads * (nope + value), latent))

    def of_heads(begin: int, size: int) -> Iterator[RawTensor]:
        return (both.take_rows(np.arange(size) + h * (nope + value) + begin) for h in range(heads))

    keys = weights.take_each(lambda: (each.transposed() for each in of_heads(0, nope)), precise=True)
    return keys, weights.take_each(lambda: (each.plain() for each in of_heads(nope, value)), precise=True)
