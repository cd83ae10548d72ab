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

from headstart.kernels.ops import Buffer, Ops, Pool, RawTensor, Weight
from headstart.layers.delta import DeltaRuleConfig
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.parts import Mixer
from headstart.layers.weights import Weights


@dataclass(frozen=True)
class KDAConfig(DeltaRuleConfig):
    """Kimi delta attention of one layer. Queries, keys and values have equally many heads, of one width."""

    bound: float = 0.0  # least log decay, below 0; 0: decays have no bound
    rank: int = 0  # of W_f and W_g; 0: each is one matrix
    full_gate: bool = False  # W_g is one matrix, whatever the rank
    num_kernels: ClassVar[int] = 14

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, in_features: int) -> "KimiDelta":
        """See MixerConfig.build. Decay and strength are never quantized: errors would accumulate over a whole text."""
        name, inner, heads, dim = f"{prefix}.self_attn", self.inner, self.delta.num_heads, self.delta.value_dim

        def linear(part: str, num_out: int, num_in: int, precise: bool = False) -> Linear:
            return Linear(weights.get(f"{name}.{part}.weight", num_out, num_in, precise=precise))

        def product(part: str, whole: str, rank: int, precise: bool = False) -> tuple[Linear, ...]:
            if not rank:
                return (linear(whole, inner, in_features, precise),)
            return (
                linear(f"{part}_a_proj", rank, in_features, precise),
                linear(f"{part}_b_proj", inner, rank, precise),
            )

        inputs = tuple(linear(f"{part}_proj", inner, in_features) for part in "qkv")
        strength = linear("b_proj", heads, in_features, precise=True)
        decay = product("f", "f_proj", self.rank, precise=True)
        gate = product("g", "gate_proj", 0 if self.full_gate else self.rank)
        conv = weights.get(f"{name}.conv", self.conv_width * self.delta.channels)
        rate = weights.raw(f"{name}.decay_rate", (heads,))

        def decay_rate() -> RawTensor:
            return rate.affine(-1 if self.bound else 1, 0).take_rows(np.repeat(np.arange(heads), dim))

        return KimiDelta(
            inputs=inputs,
            decay_proj=decay,
            strength_proj=strength,
            gate_proj=gate,
            conv=conv,
            decay_rate=weights.take(decay_rate),
            decay_bias=weights.get(f"{name}.decay_bias", inner),
            norm=weights.norm(f"{name}.o_norm", dim, eps),
            out_proj=linear("o_proj", hidden, inner),
            config=self,
        )


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
