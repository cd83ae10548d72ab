"""Attention with biases by distance, and short convolutions in every layer (Inkling).

score(q, k) = q . k / head_dim + r P[:, d] for a key d positions back, d below the extent; r is a projection of x for
each head, P [features, extent] a table. Keys and values, the output of attention and that of the feed-forward part go
through convolutions: y_p = x_p + sum over j of w_j x_(p - width + 1 + j). Formula: transformers 5.24 `models/inkling`.

Canonical tensors under `{layer}`: `self_attn.{q,k,v,r,o}_proj`, `self_attn.{q,k}_norm`, `attn_sconv.weight` and
`mlp_sconv.weight` [channels, 1, width], `self_attn.{k,v}_sconv.weight` likewise, `self_attn.rel_logits_proj.proj`
[features, extent].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from headstart.kernels.ops import AttentionSpec, Buffer, KVSpec, Ops, Pool, Weight
from headstart.kernels.specs import ConvSpec, StateSpec
from headstart.layers.decoder import DecoderLayer, ForwardState, LayerConfig
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.parts import Mixer, MixerConfig
from headstart.layers.weights import Weights


@dataclass(frozen=True)
class Convolution:
    """A short convolution that adds its input."""

    taps: Weight
    spec: ConvSpec

    def __call__(self, ops: Ops, x: Buffer, pool: Pool) -> Buffer:
        return ops.add(ops.causal_conv(x, self.taps, pool, self.spec), x)


def build_convolution(weights: Weights, name: str, spec: ConvSpec) -> Convolution:
    """Builds a convolution from `{name}.weight` [channels, (1,) width]."""
    return Convolution(weights.taps(f"{name}.weight", spec), spec)


@dataclass(frozen=True)
class RelativeConfig(MixerConfig):
    """Attention with biases by distance."""

    spec: AttentionSpec
    features: int  # of r for each head
    extent: int  # distances with a bias
    hidden: int
    conv_width: int
    num_kernels: ClassVar[int] = 14

    @property
    def attention_spec(self) -> AttentionSpec:
        return self.spec

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        return (self.spec,)

    @property
    def convs(self) -> dict[str, ConvSpec]:
        """The layer's convolutions, by name; the last one is after the feed-forward part."""
        keys = self.spec.num_kv_heads * self.spec.head_dim
        widths = {"self_attn.k_sconv": keys, "self_attn.v_sconv": keys}
        widths |= dict.fromkeys(("attn_sconv", "mlp_sconv"), self.hidden)
        return {name: ConvSpec(width, self.conv_width) for name, width in widths.items()}

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return tuple(self.convs.values())

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, in_features: int) -> Relative:
        """See MixerConfig.build."""
        name, heads, dim = f"{prefix}.self_attn", self.spec.num_heads, self.spec.head_dim
        keys = self.spec.num_kv_heads * dim
        rows = {"q": heads * dim, "k": keys, "v": keys, "r": heads * self.features}
        linears = {part: weights.linear(f"{name}.{part}_proj", size, in_features) for part, size in rows.items()}
        output = weights.linear(f"{name}.o_proj", self.hidden, heads * dim)
        table = weights.raw(f"{name}.rel_logits_proj.proj", (self.features, self.extent))
        q_norm, k_norm = (weights.norm(f"{name}.{part}_norm", dim, eps) for part in "qk")
        k_conv, v_conv, out_conv, _ = (
            build_convolution(weights, f"{prefix}.{each}", spec) for each, spec in self.convs.items()
        )
        return Relative(
            **linears, o=output, q_norm=q_norm, k_norm=k_norm,
            profile=weights.take(
                lambda: table.transposed().take_rows(np.arange(self.extent)[::-1].copy()), precise=True
            ),
            k_conv=k_conv, v_conv=v_conv, out_conv=out_conv, config=self,
        )  # fmt: skip


@dataclass(frozen=True)
class Relative(Mixer):
    """Attention with biases by distance and convolved keys and values; formula in the module's docstring."""

    q: Linear
    k: Linear
    v: Linear
    r: Linear
    o: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    profile: Weight  # of each head [extent, features], the farthest first
    k_conv: Convolution
    v_conv: Convolution
    out_conv: Convolution
    config: RelativeConfig

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        kv, k_pool, v_pool, out_pool, _ = convolution_pools(pool)
        q, k, v, r = (linear(ops, x) for linear in (self.q, self.k, self.v, self.r))
        bias = ops.head_linear(r, (self.profile,) * self.config.spec.num_heads)
        k = self.k_norm(ops, self.k_conv(ops, k, k_pool))
        ops.store_kv(k, self.v_conv(ops, v, v_pool), kv, self.config.spec)
        attended = ops.attend(self.q_norm(ops, q), kv, self.config.spec, bias=bias)
        return self.out_conv(ops, self.o(ops, attended), out_pool)


def convolution_pools(pool: Pool) -> tuple[Pool, ...]:
    """The KV pool and those of the four convolutions; in training the latter are None."""
    return pool if isinstance(pool, tuple) else (pool, None, None, None, None)


@dataclass(frozen=True, kw_only=True)
class ConvolvedLayerConfig(LayerConfig):
    """A layer whose feed-forward part has a convolution after it; its state belongs to the mixer."""

    mixer: RelativeConfig

    def build(self, weights: Weights, prefix: str, hidden: int, *, in_features: int | None = None) -> ConvolvedLayer:
        plain = super().build(weights, prefix, hidden, in_features=in_features)
        conv = build_convolution(weights, f"{prefix}.mlp_sconv", self.mixer.convs["mlp_sconv"])
        return ConvolvedLayer(**vars(plain), conv=conv)


@dataclass(frozen=True, kw_only=True)
class ConvolvedLayer(DecoderLayer):
    """A decoder layer with a convolution after its feed-forward part."""

    conv: Convolution

    def __call__(
        self, ops: Ops, delta: Buffer | None, residual: Buffer, positions: Buffer, pool: Pool,
        state: ForwardState | None = None,
    ) -> tuple[Buffer, Buffer]:  # fmt: skip
        x, residual = self.input_norm.add(ops, delta, residual)
        x, residual = self.post_norm.add(ops, self.mixer(ops, x, positions, pool), residual)
        return self.conv(ops, self.mlp(ops, x), convolution_pools(pool)[-1]), residual
