"""Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024): linear attention with a decaying state and the delta rule.

[q, k, v] = activation(conv(W_qkv x)); decay and strength by head from x; o = recurrence (see Ops.gated_delta);
y = W_out (norm(o) * silu(W_z x)), the norm over each head. Formula: transformers 5.23, Qwen3-Next's GatedDeltaNet.

Canonical tensors under `{layer}.linear_attn`: `in_proj_{qkv,z,a,b}.weight`, `conv` [width * channels] (taps oldest
first), `decay_rate` [heads] (negative), `decay_bias` [heads], `norm.weight` [value_dim], `out_proj.weight`.
"""

from dataclasses import dataclass
from typing import ClassVar

from headstart.kernels.ops import Activation, Buffer, Ops, Pool, Weight
from headstart.kernels.specs import ConvSpec, DeltaSpec, StateSpec
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.parts import Mixer, MixerConfig
from headstart.layers.weights import Weights


@dataclass(frozen=True)
class DeltaRuleConfig(MixerConfig):
    """Linear attention by the delta rule, behind a convolution of queries, keys and values."""

    delta: DeltaSpec
    conv_width: int  # taps of the convolution
    activation: Activation = "silu"  # after the convolution

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return self.conv, self.delta

    @property
    def conv(self) -> ConvSpec:
        return ConvSpec(self.delta.channels, self.conv_width)

    @property
    def inner(self) -> int:
        """Columns of the values of all heads."""
        return self.delta.num_heads * self.delta.value_dim


@dataclass(frozen=True)
class DeltaConfig(DeltaRuleConfig):
    """Gated DeltaNet of one layer."""

    sigmoid_gate: bool = False  # the output is multiplied by sigmoid(W_z x) instead of silu
    num_kernels: ClassVar[int] = 10

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, in_features: int) -> "GatedDeltaNet":
        """See MixerConfig.build. Decay and strength are never quantized: errors would accumulate over a whole text."""
        heads, name = self.delta.num_heads, f"{prefix}.linear_attn"
        weights.unlisted(f"{name}.in_proj_a.weight", heads, in_features)  # names a wrong number of heads
        return GatedDeltaNet(
            qkv_proj=weights.linear(f"{name}.in_proj_qkv", self.delta.channels, in_features),
            z_proj=weights.linear(f"{name}.in_proj_z", self.inner, in_features),
            a_proj=Linear(weights.get(f"{name}.in_proj_a.weight", heads, in_features, precise=True)),
            b_proj=Linear(weights.get(f"{name}.in_proj_b.weight", heads, in_features, precise=True)),
            conv=weights.get(f"{name}.conv", self.conv_width * self.delta.channels),
            decay_rate=weights.get(f"{name}.decay_rate", heads),
            decay_bias=weights.get(f"{name}.decay_bias", heads),
            norm=weights.norm(f"{name}.norm", self.delta.value_dim, eps),
            out_proj=weights.linear(f"{name}.out_proj", hidden, self.inner),
            config=self,
        )


@dataclass(frozen=True)
class GatedDeltaNet(Mixer):
    """The Gated DeltaNet part of a layer; formula in the module's docstring."""

    qkv_proj: Linear
    z_proj: Linear
    a_proj: Linear
    b_proj: Linear
    conv: Weight
    decay_rate: Weight
    decay_bias: Weight
    norm: RMSNorm
    out_proj: Linear
    config: DeltaConfig

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        """`pool`: the pools of the convolution and of the recurrence; None in training."""
        conv_pool, delta_pool = pool or (None, None)
        qkv, z = self.qkv_proj(ops, x), self.z_proj(ops, x)
        a, b = self.a_proj(ops, x), self.b_proj(ops, x)
        qkv = ops.activate(ops.causal_conv(qkv, self.conv, conv_pool, self.config.conv), self.config.activation)
        log_decay = ops.softplus(a, self.decay_rate, self.decay_bias)
        read = ops.gated_delta(qkv, log_decay, b, delta_pool, self.config.delta)
        normed = self.norm(ops, read)
        return self.out_proj(
            ops, ops.sigmoid_mul(z, normed) if self.config.sigmoid_gate else ops.activate_mul(z, normed)
        )
