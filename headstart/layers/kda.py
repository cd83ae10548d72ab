"""Kimi delta attention (Kimi Linear, arXiv 2510.26692, section 3): Gated DeltaNet with a decay for each key feature.

[q, k, v] = silu(conv([W_q x, W_k x, W_v x])); strength by head from x; the log decay of each key feature is
rate * ln(1 + e^(W_f x + bias)), or bound * sigmoid(-rate * (W_f x + bias)) with a lower bound; o = recurrence (see
Ops.gated_delta); y = W_o (norm(o) * sigmoid(W_g x)), the norm over each head. W_f and W_g may be products of two
matrices. Formula: transformers 5.24, `KimiLinearDeltaAttention` and `BailingHybridDeltaAttention`.

Canonical tensors under `{layer}.self_attn`: `{q,k,v,o}_proj`, `conv` [width * channels] (taps oldest first), `b_proj`
[heads, H], `f_proj` or `f_a_proj` and `f_b_proj`, `gate_proj` or `g_a_proj` and `g_b_proj`, `decay_rate` [heads]
(negative), `decay_bias` [heads * dim], `o_norm.weight` [dim].
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from headstart.kernels.ops import Activation, Buffer, Ops, Pool, Weight
from headstart.kernels.specs import ConvSpec, DeltaSpec, StateSpec
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.parts import Mixer, MixerConfig
from headstart.layers.weights import Shapes, Weights


@dataclass(frozen=True)
class KDAConfig(MixerConfig):
    """Kimi delta attention of one layer."""

    num_heads: int
    head_dim: int  # features of a query, key and value
    conv_width: int  # taps of the convolution
    bound: float = 0.0  # least log decay, below 0; 0: decays have no bound
    rank: int = 0  # of W_f and W_g; 0: each is one matrix
    full_gate: bool = False  # W_g is one matrix, whatever the rank
    activation: Activation = "silu"  # after the convolution
    num_kernels: ClassVar[int] = 14

    @property
    def delta(self) -> DeltaSpec:
        return DeltaSpec(self.num_heads, self.num_heads, self.head_dim, self.head_dim, by_channel=True)

    @property
    def conv(self) -> ConvSpec:
        return ConvSpec(self.delta.channels, self.conv_width)

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return self.conv, self.delta

    @property
    def inner(self) -> int:
        """Columns of the values of all heads."""
        return self.num_heads * self.head_dim

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, in_features: int) -> "KimiDelta":
        """See MixerConfig.build. Decay and strength are never quantized: errors would accumulate over a whole text."""
        name, shapes = f"{prefix}.self_attn", self.shapes(prefix, hidden, in_features=in_features)

        def linears(*parts: str, precise: bool = False) -> tuple[Linear, ...]:
            names = [f"{name}.{part}.weight" for part in parts if f"{name}.{part}.weight" in shapes]
            return tuple(Linear(weights.get(each, *shapes[each], precise=precise)) for each in names)

        heads = np.repeat(np.arange(self.num_heads), self.head_dim)
        rate = weights.raw(f"{name}.decay_rate", (self.num_heads,)).affine(-1 if self.bound else 1, 0)
        return KimiDelta(
            inputs=linears("q_proj", "k_proj", "v_proj"),
            decay_proj=linears("f_proj", "f_a_proj", "f_b_proj", precise=True),
            strength_proj=linears("b_proj", precise=True)[0],
            gate_proj=linears("gate_proj", "g_a_proj", "g_b_proj"),
            conv=weights.get(f"{name}.conv", self.conv_width * self.delta.channels),
            decay_rate=weights.take(rate.take_rows(heads)),
            decay_bias=weights.get(f"{name}.decay_bias", self.inner),
            norm=weights.norm(f"{name}.o_norm", self.head_dim, eps),
            out_proj=linears("o_proj")[0],
            config=self,
        )

    def shapes(self, prefix: str, hidden: int, *, in_features: int) -> Shapes:
        """Names and shapes of what `build` takes."""
        name, inner = f"{prefix}.self_attn", self.inner
        matrices = {f"{part}_proj": (inner, in_features) for part in "qkv"} | {"b_proj": (self.num_heads, in_features)}
        for part, whole, low_rank in (("f", "f_proj", self.rank), ("g", "gate_proj", self.rank and not self.full_gate)):
            if low_rank:
                matrices |= {f"{part}_a_proj": (self.rank, in_features), f"{part}_b_proj": (inner, self.rank)}
            else:
                matrices[whole] = (inner, in_features)
        return {
            **{f"{name}.{part}.weight": shape for part, shape in matrices.items()},
            f"{name}.conv": (self.conv_width * self.delta.channels,),
            f"{name}.decay_rate": (self.num_heads,),
            f"{name}.decay_bias": (inner,),
            f"{name}.o_norm.weight": (self.head_dim,),
            f"{name}.o_proj.weight": (hidden, inner),
        }


@dataclass(frozen=True)
class KimiDelta(Mixer):
    """The Kimi delta attention of a layer; formula in the module's docstring."""

    inputs: tuple[Linear, ...]  # W_q, W_k, W_v
    decay_proj: tuple[Linear, ...]
    strength_proj: Linear
    gate_proj: tuple[Linear, ...]
    conv: Weight
    decay_rate: Weight
    decay_bias: Weight
    norm: RMSNorm
    out_proj: Linear
    config: KDAConfig

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        """`pool`: the pools of the convolution and of the recurrence; None in training."""
        config, (conv_pool, delta_pool) = self.config, pool or (None, None)
        q, k, v = (linear(ops, x) for linear in self.inputs)
        strength, decay, gate = self.strength_proj(ops, x), x, x
        for linear in self.decay_proj:
            decay = linear(ops, decay)
        for linear in self.gate_proj:
            gate = linear(ops, gate)
        qkv = ops.concat(ops.concat(q, k), v)
        qkv = ops.activate(ops.causal_conv(qkv, self.conv, conv_pool, config.conv), config.activation)
        if config.bound:
            decay = ops.bounded_decay(decay, self.decay_rate, self.decay_bias, config.bound)
        else:
            decay = ops.softplus(decay, self.decay_rate, self.decay_bias)
        read = ops.gated_delta(qkv, decay, strength, delta_pool, config.delta)
        return self.out_proj(ops, ops.sigmoid_mul(gate, self.norm(ops, read)))
