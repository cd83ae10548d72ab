"""Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024): linear attention over a state that decays and corrects itself.

[q, k, v] = silu(conv(W_qkv x)); decay and strength by head from x; o = recurrence (see Ops.gated_delta);
y = W_out (norm(o) * silu(W_z x)), the norm over each head. Formula: transformers 5.23, Qwen3-Next's GatedDeltaNet.
"""

from __future__ import annotations

from dataclasses import dataclass

from headstart.kernels.ops import Buffer, ConvSpec, DeltaSpec, Ops, Pool, StateSpec, Weight
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm


@dataclass(frozen=True)
class GatedDeltaNet:
    """`decay_rate` [heads] is negative; `conv` [width * channels], oldest tap first."""

    qkv_proj: Linear
    z_proj: Linear
    a_proj: Linear
    b_proj: Linear
    conv: Weight
    decay_rate: Weight
    decay_bias: Weight
    norm: RMSNorm
    out_proj: Linear
    spec: DeltaSpec
    conv_spec: ConvSpec
    kv_spec: None = None

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return self.conv_spec, self.spec

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        """`pool`: those of the convolution and of the recurrence."""
        conv_pool, delta_pool = pool
        qkv, z = self.qkv_proj(ops, x), self.z_proj(ops, x)
        a, b = self.a_proj(ops, x), self.b_proj(ops, x)
        qkv = ops.silu(ops.causal_conv(qkv, self.conv, conv_pool, self.conv_spec))
        log_decay = ops.decay(a, self.decay_rate, self.decay_bias)
        read = ops.gated_delta(qkv, log_decay, ops.sigmoid(b), delta_pool, self.spec)
        return self.out_proj(ops, ops.silu_mul(z, self.norm(ops, read)))
