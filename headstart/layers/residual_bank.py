"""Attention residuals (AttnRes; Kimi-K3): each part of a layer reads a mixture of earlier sums of outputs.

A row holds sums [b_1 ; ... ; b_n ; s] [R, (n + 1) H]: s of the outputs since the current block of layers began, b_k of
earlier blocks, b_1 being the embedding. Every `every`th layer, from the first on, begins a block: its mixer's output
is the new s. A part reads its norm of x = sum_k softmax_k(w . norm(sum_k)) sum_k; after the last layer the final norm
reads such an x. Formula: vLLM 0.33, `models/kimi_k3/amd/linear.py` and `ops/attn_res.py`.

Canonical tensors under `{layer}.self_attention_res`, `{layer}.mlp_res` and `output_attn_res`: `_norm.weight` [H] and
`_proj.weight` [1, H].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from headstart.kernels.ops import Buffer, Ops, Pool, Weight
from headstart.kernels.specs import StreamSpec
from headstart.layers.decoder import DecoderLayer, ForwardState, LayerConfig
from headstart.layers.norm import RMSNorm
from headstart.layers.streams import StreamExpansion
from headstart.layers.weights import Weights

PARTS, END = ("self_attention_res", "mlp_res"), "output_attn_res"


@dataclass(frozen=True)
class Mixture:
    """The mixture that a part reads."""

    norm: RMSNorm
    score: Weight  # [1, H]
    spec: StreamSpec
    base: Weight  # [count], zeros
    scale: Weight  # [1], a one

    def __call__(self, ops: Ops, sums: Buffer) -> Buffer:
        """[R, count * H] -> [R, H]."""
        if self.spec.count == 1:
            return sums
        scores = ops.head_linear(self.norm(ops, sums), (self.score,) * self.spec.count)
        return ops.sum_streams(sums, ops.stream_weights(scores, self.base, self.scale, self.spec), self.spec)

    def add(self, ops: Ops, sums: Buffer, x: Buffer) -> Buffer:
        """Sums [R, count * H] with x [R, H] added to the last one."""
        count, width = self.spec.count, len(self.norm.weight)
        if count == 1:
            return ops.add(sums, x)
        before, last = ops.columns(sums, 0, (count - 1) * width), ops.columns(sums, (count - 1) * width, width)
        return ops.concat(before, ops.add(last, x))


def build_mixture(weights: Weights, name: str, hidden: int, eps: float, count: int) -> Mixture:
    """Builds the mixture of `count` sums from the tensors `{name}_norm` and `{name}_proj`."""
    return Mixture(
        norm=weights.norm(f"{name}_norm", hidden, eps),
        score=weights.get(f"{name}_proj.weight", 1, hidden, precise=True),
        spec=StreamSpec(count, 0, 0.0, softmax=True),
        base=weights.zeros(count),
        scale=weights.ones(1),
    )


@dataclass(frozen=True)
class ResidualBankConfig:
    """The sums of all layers."""

    every: int  # layers of a block
    num_layers: int
    count: ClassVar[int] = 1  # residual streams that heads know of

    def num_sums(self, layer: int) -> int:
        """Sums before a layer; after the last one for the number of layers."""
        return -(-layer // self.every) + 1

    def build(self, weights: Weights, hidden: int, eps: float) -> ResidualBank:
        return ResidualBank(build_mixture(weights, END, hidden, eps, self.num_sums(self.num_layers)))


@dataclass(frozen=True)
class ResidualBank(StreamExpansion):
    """From the embedding to the first sum, and from the last sums to their mixture."""

    end: Mixture

    def expand(self, ops: Ops, x: Buffer) -> Buffer:
        """The first sum is the embedding [R, H]."""
        return x

    def collapse(self, ops: Ops, sums: Buffer, before: Buffer | None = None) -> tuple[Buffer, None]:
        """[R, sums * H] -> [R, H]."""
        return self.end(ops, sums), None

    def tapped(self, ops: Ops, streams: Buffer, layer: Any, *, sums: bool) -> Buffer:
        """The mixture that the next part reads, or the newest sum."""
        mixture: Mixture = layer.mixtures[0] if layer else self.end
        if not sums or mixture.spec.count == 1:
            return mixture(ops, streams)
        width = len(mixture.norm.weight)
        return ops.columns(streams, (mixture.spec.count - 1) * width, width)


@dataclass(frozen=True, kw_only=True)
class BankLayerConfig(LayerConfig):
    """A layer with attention residuals."""

    num_sums: int  # before the layer
    begins: bool  # the layer begins a block

    @property
    def _stream_kernels(self) -> int:
        return 4

    def build(self, weights: Weights, prefix: str, hidden: int, *, in_features: int | None = None) -> BankLayer:
        plain = super().build(weights, prefix, hidden, in_features=in_features)
        counts = self.num_sums, self.num_sums + self.begins
        return BankLayer(
            **vars(plain),
            mixtures=tuple(
                build_mixture(weights, f"{prefix}.{part}", hidden, self.eps, count)
                for part, count in zip(PARTS, counts, strict=True)
            ),
            begins=self.begins,
        )


@dataclass(frozen=True, kw_only=True)
class BankLayer(DecoderLayer):
    """A layer with attention residuals (see the module)."""

    mixtures: tuple[Mixture, ...]
    begins: bool

    def __call__(
        self, ops: Ops, delta: Buffer | None, residual: Buffer, positions: Buffer, pool: Pool,
        state: ForwardState | None = None,
    ) -> tuple[None, Buffer]:  # fmt: skip
        """Sums [R, n * H] -> (None, sums after the layer)."""
        before, between = self.mixtures
        mixed = self.mixer(ops, self.input_norm(ops, before(ops, residual)), positions, pool)
        sums = ops.concat(residual, mixed) if self.begins else before.add(ops, residual, mixed)
        y = self.mlp(ops, self.post_norm(ops, between(ops, sums)), state.token_ids if state else None)
        return None, between.add(ops, sums, y)
