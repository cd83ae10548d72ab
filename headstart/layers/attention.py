"""Grouped-query attention with rotary positions over a paged KV pool.

Canonical tensors under `{layer}.self_attn`: `{q,k,v,o}_proj`, `gate_proj`, `{q,k}_norm`, `sinks` [heads].
"""

from __future__ import annotations

from dataclasses import dataclass

from headstart.kernels.ops import AttentionSpec, Buffer, Ops, Pool, RopeSpec, TemperSpec, Weight
from headstart.kernels.states import StateSpec
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.weights import Shapes, Weights


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """`rope` None: positions are not rotated. `qk_norm`: of each head, or `wide_norms`: over all heads together;
    `norms_last`: behind the rope; `plain_norms`: without weights. `temper`: queries grow with their position. `gated`:
    the output is multiplied by sigmoid(gate x); `head_gates`: a number for each head. `shares`: the index of an earlier
    layer, whose keys and values are read in place of own ones. `sinks`: see Ops.attend. `v_norm`: values are normed
    too, without a weight. `keys_are_values`: v is what k is before its norm and rope. `value_scale`: what values are
    multiplied by."""

    spec: AttentionSpec
    rope: RopeSpec | None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    wide_norms: bool = False
    norms_last: bool = False
    plain_norms: bool = False
    temper: TemperSpec | None = None
    gated: bool = False
    head_gates: bool = False
    shares: int | None = None
    sinks: bool = False
    v_norm: bool = False
    keys_are_values: bool = False
    value_scale: float = 1.0

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, reads: int) -> Attention:
        """The attention of the layer `prefix`; q, k and v read as many columns as `reads`."""
        name = f"{prefix}.self_attn"
        linears = {
            part: weights.linear(f"{name}.{part}", *shape, bias=bias)
            for part, (shape, bias) in self._linears(hidden, reads).items()
        }
        norms = {
            part: weights.plain_norm(width, eps) if self.plain_norms else weights.norm(f"{name}.{part}", width, eps)
            for part, width in self._norms.items()
        }
        return Attention(
            q_proj=linears["q_proj"],
            k_proj=linears.get("k_proj"),
            v_proj=linears.get("v_proj"),
            gate_proj=linears.get("gate_proj"),
            o_proj=linears["o_proj"],
            q_norm=norms.get("q_norm"),
            k_norm=norms.get("k_norm"),
            v_norm=weights.plain_norm(self.spec.head_dim, eps) if self.v_norm and self.shares is None else None,
            spec=self.spec,
            rope=self.rope,
            norms_last=self.norms_last,
            temper=self.temper,
            sinks=weights.get(f"{name}.sinks", self.spec.num_heads) if self.sinks else None,
            shares=self.shares,
            value_scale=self.value_scale,
        )

    def shapes(self, prefix: str, hidden: int, *, reads: int) -> Shapes:
        """Names and shapes of what `build` takes."""
        shapes: Shapes = {}
        for name, (shape, bias) in self._linears(hidden, reads).items():
            shapes[f"{prefix}.self_attn.{name}.weight"] = shape
            if bias:
                shapes[f"{prefix}.self_attn.{name}.bias"] = shape[:1]
        if not self.plain_norms:
            shapes |= {f"{prefix}.self_attn.{name}.weight": (width,) for name, width in self._norms.items()}
        return shapes | ({f"{prefix}.self_attn.sinks": (self.spec.num_heads,)} if self.sinks else {})

    def _linears(self, hidden: int, reads: int) -> dict[str, tuple[tuple[int, int], bool]]:
        """Projections: (out, in), with a bias?"""
        spec = self.spec
        out = spec.num_heads * spec.value_width
        sizes = {"q_proj": spec.num_heads * spec.head_dim}
        if self.shares is None:
            sizes["k_proj"] = spec.num_kv_heads * spec.head_dim
            if not self.keys_are_values:
                sizes["v_proj"] = spec.num_kv_heads * spec.value_width
        if self.gated:
            sizes["gate_proj"] = spec.num_heads if self.head_gates else out
        plain = {"gate_proj"} if self.head_gates else set[str]()  # without a bias
        read = {name: ((size, reads), self.qkv_bias and name not in plain) for name, size in sizes.items()}
        return {**read, "o_proj": ((hidden, out), self.o_bias)}

    @property
    def _norms(self) -> dict[str, int]:
        """Norms of queries and keys, and their widths."""
        if not self.qk_norm:
            return {}
        heads = {"q_norm": self.spec.num_heads} | ({"k_norm": self.spec.num_kv_heads} if self.shares is None else {})
        return {name: self.spec.head_dim * (count if self.wide_norms else 1) for name, count in heads.items()}


@dataclass(frozen=True)
class Attention:
    """q, k, v projections, optional per-head q/k norms, rope, causal attention, optional gate, output projection.
    No `k_proj`: the pool is that of the layer `shares`; no `v_proj` beside it: v is k before its norm."""

    q_proj: Linear
    k_proj: Linear | None
    v_proj: Linear | None
    gate_proj: Linear | None
    o_proj: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    spec: AttentionSpec
    rope: RopeSpec | None
    v_norm: RMSNorm | None = None
    norms_last: bool = False
    temper: TemperSpec | None = None
    sinks: Weight | None = None
    shares: int | None = None
    value_scale: float = 1.0

    @property
    def kv_specs(self) -> tuple[AttentionSpec, ...]:
        return (self.spec,) if self.shares is None else ()

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return ()

    def keep(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> None:
        """Store the keys and values of rows that have no queries."""
        assert self.k_proj
        k = self.k_proj(ops, x)
        self._store(ops, k, self.v_proj(ops, x) if self.v_proj else k, positions, pool)

    def _store(self, ops: Ops, k: Buffer, v: Buffer, positions: Buffer, pool: Pool) -> None:
        v = self.v_norm(ops, v) if self.v_norm else v
        v = v if self.value_scale == 1 else ops.scale(v, self.value_scale)
        ops.store_kv(self._placed(ops, k, self.k_norm, positions), v, pool, self.spec)

    def _placed(self, ops: Ops, x: Buffer, norm: RMSNorm | None, positions: Buffer) -> Buffer:
        """Queries or keys, normed and rotated."""
        if norm and not self.norms_last:
            x = norm(ops, x)
        if self.rope:
            x = ops.rope(x, positions, self.rope, self.spec.head_dim)
        return norm(ops, x) if norm and self.norms_last else x

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        q = self.q_proj(ops, x)
        k = self.k_proj(ops, x) if self.k_proj else None
        v = self.v_proj(ops, x) if self.v_proj else k
        gate = self.gate_proj(ops, x) if self.gate_proj else None
        q = self._placed(ops, q, self.q_norm, positions)
        q = ops.temper(q, positions, self.temper) if self.temper else q
        if self.k_proj:
            self._store(ops, k, v, positions, pool)
        attended = ops.attend(q, pool, self.spec, self.sinks)
        return self.o_proj(ops, attended if gate is None else ops.sigmoid_mul(gate, attended))
