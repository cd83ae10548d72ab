"""Grouped-query attention with rotary positions over a paged KV pool.

Canonical tensors under `{layer}.self_attn`: `{q,k,v,o}_proj`, `gate_proj`, `{q,k}_norm`, `sinks` [heads]; `indexer`
(layers/indexer.py).
"""

from dataclasses import dataclass

from headstart.kernels.ops import AttentionSpec, AttentionTemperature, Buffer, KVSpec, Ops, Pool, RopeSpec, Weight
from headstart.layers.indexer import BlockIndexer, BlockIndexerConfig, Indexer, IndexerConfig
from headstart.layers.linear import Linear, scale
from headstart.layers.norm import RMSNorm
from headstart.layers.parts import Mixer, MixerConfig
from headstart.layers.weights import Weights


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(MixerConfig):
    """Grouped-query attention of one layer."""

    spec: AttentionSpec
    rope: RopeSpec | None  # None: no rotary positions
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # RMSNorm of queries and keys
    qk_norm_over_heads: bool = False  # over all heads together; False: over each head
    qk_norm_after_rope: bool = False
    qk_norm_unweighted: bool = False
    temperature: AttentionTemperature | None = None  # queries grow with their position
    gated: bool = False  # the output is multiplied by sigmoid(gate_proj x)
    gate_per_head: bool = False  # one gate value per head; False: one per feature
    source_layer: int | None = None  # index of the earlier layer whose keys and values are read instead of own ones
    sinks: bool = False  # see Ops.attend
    v_norm: bool = False  # RMSNorm of values, without a weight
    keys_are_values: bool = False  # v is k before its norm and rope
    value_scale: float = 1.0  # multiplies values
    indexer: IndexerConfig | BlockIndexerConfig | None = None  # selects the positions that a row attends to

    @property
    def num_kernels(self) -> int:
        return 13 if self.indexer else 7

    @property
    def attention_spec(self) -> AttentionSpec:
        return self.spec

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """Pools of keys and values, then of the indexer's keys."""
        own = (self.spec,) if self.source_layer is None else ()
        return (*own, *self.indexer.kv_specs) if self.indexer else own

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, in_features: int) -> "Attention":
        """See MixerConfig.build."""
        name, spec, has_keys = f"{prefix}.self_attn", self.spec, self.source_layer is None
        out = spec.num_heads * spec.value_width

        def linear(part: str, size: int, *, bias: bool = self.qkv_bias) -> Linear:
            return weights.linear(f"{name}.{part}", size, in_features, bias=bias)

        def norm(part: str, num_heads: int) -> RMSNorm:
            width = spec.head_dim * (num_heads if self.qk_norm_over_heads else 1)
            if self.qk_norm_unweighted:
                return weights.unweighted_norm(width, eps)
            return weights.norm(f"{name}.{part}", width, eps)

        has_values = has_keys and not self.keys_are_values
        gate, has_gate_bias = (spec.num_heads, False) if self.gate_per_head else (out, self.qkv_bias)
        return Attention(
            q_proj=linear("q_proj", spec.num_heads * spec.head_dim),
            k_proj=linear("k_proj", spec.num_kv_heads * spec.head_dim) if has_keys else None,
            v_proj=linear("v_proj", spec.num_kv_heads * spec.value_width) if has_values else None,
            gate_proj=linear("gate_proj", gate, bias=has_gate_bias) if self.gated else None,
            o_proj=weights.linear(f"{name}.o_proj", hidden, out, bias=self.o_bias),
            q_norm=norm("q_norm", spec.num_heads) if self.qk_norm else None,
            k_norm=norm("k_norm", spec.num_kv_heads) if self.qk_norm and has_keys else None,
            v_norm=weights.unweighted_norm(spec.head_dim, eps) if self.v_norm and has_keys else None,
            indexer=self.indexer.build(weights, name, in_features, in_features=in_features) if self.indexer else None,
            sinks=weights.get(f"{name}.sinks", spec.num_heads) if self.sinks else None,
            config=self,
        )


@dataclass(frozen=True)
class Attention(Mixer):
    """q, k, v projections, q and k norms, rope, causal attention, gate, output projection."""

    q_proj: Linear
    k_proj: Linear | None  # None: keys and values are those of config.source_layer
    v_proj: Linear | None  # None: v is k before its norm
    gate_proj: Linear | None
    o_proj: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    v_norm: RMSNorm | None
    sinks: Weight | None
    config: AttentionConfig
    indexer: Indexer | BlockIndexer | None = None

    def store(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> None:
        """Stores keys and values of rows without queries."""
        assert self.k_proj
        k = self.k_proj(ops, x)
        self._store(ops, k, self.v_proj(ops, x) if self.v_proj else k, positions, pool)

    def _store(self, ops: Ops, k: Buffer, v: Buffer, positions: Buffer, pool: Pool) -> None:
        v = self.v_norm(ops, v) if self.v_norm else v
        v = scale(ops, v, self.config.value_scale)
        ops.store_kv(self._norm_and_rotate(ops, k, self.k_norm, positions), v, pool, self.config.spec)

    def _norm_and_rotate(self, ops: Ops, x: Buffer, norm: RMSNorm | None, positions: Buffer) -> Buffer:
        """Queries or keys after norm and rope."""
        config = self.config
        if norm and not config.qk_norm_after_rope:
            x = norm(ops, x)
        if config.rope:
            x = ops.rope(x, positions, config.rope, config.spec.head_dim)
        return norm(ops, x) if norm and config.qk_norm_after_rope else x

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        q = self.q_proj(ops, x)
        k = self.k_proj(ops, x) if self.k_proj else None
        v = self.v_proj(ops, x) if self.v_proj else k
        gate = self.gate_proj(ops, x) if self.gate_proj else None
        chosen: Pool = None
        if self.indexer:
            pool, *indexed = pool
            self.indexer(ops, self.indexer.project(ops, x), x, positions, tuple(indexed))
            chosen = indexed[-1]
        q = self._norm_and_rotate(ops, q, self.q_norm, positions)
        q = ops.scale_by_position(q, positions, self.config.temperature) if self.config.temperature else q
        if self.k_proj:
            self._store(ops, k, v, positions, pool)
        attended = ops.attend(q, pool, self.config.spec, self.sinks, chosen)
        return self.o_proj(ops, attended if gate is None else ops.sigmoid_mul(gate, attended))
