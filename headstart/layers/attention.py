"""Grouped-query attention with rotary positions over a paged KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.kernels.ops import AttentionSpec, Buffer, Ops, Pool, RopeSpec, StateSpec
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm


@dataclass(frozen=True)
class Attention:
    """q, k, v projections, optional per-head q/k norms, rope, causal attention, optional gate (its output is multiplied
    by sigmoid(gate x)), output projection."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    spec: AttentionSpec
    rope: RopeSpec
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    gate_proj: Linear | None = None

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return ()

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        q, k, v = self.q_proj(ops, x), self.k_proj(ops, x), self.v_proj(ops, x)
        gate = self.gate_proj(ops, x) if self.gate_proj else None
        if self.q_norm and self.k_norm:
            q, k = self.q_norm(ops, q), self.k_norm(ops, k)
        q = ops.rope(q, positions, self.rope, self.spec.head_dim)
        k = ops.rope(k, positions, self.rope, self.spec.head_dim)
        ops.store_kv(k, v, pool, self.spec)
        attended = ops.attend(q, pool, self.spec)
        return self.o_proj(ops, attended if gate is None else ops.sigmoid_mul(gate, attended))
