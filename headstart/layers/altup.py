"""Alternating updates (AltUp, Baykal et al. 2023) and learned residuals (LAuReL, Menghani et al. 2024) of Gemma 3n.

Of several residual streams each layer computes one (`a`, the active one), predicts the others and corrects all.
Formula: transformers 5.23, `modeling_gemma3n.py`, with m(x) = tanh(W norm(x) / H):

    p_k = x_k + sum over j of (P m(x_a))_kj x_j                                               predict
    r = norm(p_a);  s = (p_a + norm(mixer(r)) + r + norm(right(left(r)))) / sqrt(2);  y = s + norm(mlp(norm(s)))
    c_k = p_k + (1 + (C m(y))_k) (y - p_a);  x_k = c_k + [k > 0] post_block(scale * c_a)

Before the first layer stream 0 is the embedding e, and stream k is P_k e with the norm of e. After the last layer each
U_k x_k gets the norm of x_0; the result is the mean of all.

Canonical tensors: `altup_projections.{k - 1}.weight` and `altup_unembed_projections.{k - 1}.weight` [H, H]; under
`{layer}.altup`: `modality_router.weight` [n, H], `router_norm.weight` [H], `prediction_coefs.weight` [n * n, n],
`correction_coefs.weight` [n, n], `correct_output_scale` [H]; under `{layer}.laurel`: `linear_left.weight` [rank, H],
`linear_right.weight` [H, rank], `post_laurel_norm.weight` [H].
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.kernels.ops import Buffer, Ops, Pool, Weight
from headstart.kernels.specs import StreamSpec
from headstart.layers.decoder import DecoderLayer, ForwardState, LayerConfig
from headstart.layers.linear import Linear
from headstart.layers.mlp import Magnitude, build_magnitude
from headstart.layers.norm import RMSNorm
from headstart.layers.streams import StreamExpansion
from headstart.layers.weights import Weights

BEGIN, END = "altup_projections", "altup_unembed_projections"


@dataclass(frozen=True, kw_only=True)
class AltUpConfig:
    """Streams of all layers."""

    count: int  # streams
    active: int  # index of the stream that layers compute
    rank: int  # of the learned residual
    scaled: bool = True  # a vector multiplies the input of a layer's post_block

    @property
    def spec(self) -> StreamSpec:
        return StreamSpec(self.count, 0, 0.0)

    def build(self, weights: Weights, hidden: int) -> AltUpProjections:
        """Builds the projections before the first and after the last layer."""
        expand, collapse = (
            tuple(weights.linear(f"{name}.{k}", hidden, hidden) for k in range(self.count - 1)) for name in (BEGIN, END)
        )
        selectors = tuple(_one_hot(weights, k, self.count * hidden) for k in range(self.count))
        return AltUpProjections(self.spec, expand, collapse, selectors, build_magnitude(weights, hidden))


def _one_hot(weights: Weights, index: int, size: int) -> Weight:
    return weights.constant(f"pick {index} of {size}", lambda: np.arange(size) == index)


@dataclass(frozen=True)
class AltUpProjections(StreamExpansion):
    """From one stream to all and back."""

    spec: StreamSpec
    expand_projs: tuple[Linear, ...]  # one per stream but the first
    collapse_projs: tuple[Linear, ...]
    selectors: tuple[Weight, ...]  # [n * H] per stream k: number k is 1, the others are 0
    magnitude: Magnitude

    def expand(self, ops: Ops, x: Buffer) -> Buffer:
        """[R, H] -> [R, n * H]."""
        _, length = self.magnitude.split(ops, x)
        wide = x
        for linear in self.expand_projs:
            wide = ops.concat(wide, self.magnitude.rescale(ops, linear(ops, x), length))
        return wide

    def collapse(self, ops: Ops, streams: Buffer, before: Buffer | None = None) -> tuple[Buffer, None]:
        """[R, n * H] -> their mean [R, H]."""
        zero = ops.scale(streams, 0.0)
        total, *others = (ops.sum_streams(streams, ops.add_bias(zero, each), self.spec) for each in self.selectors)
        _, length = self.magnitude.split(ops, total)
        for linear, other in zip(self.collapse_projs, others, strict=True):
            total = ops.add(total, self.magnitude.rescale(ops, linear(ops, other), length))
        return ops.scale(total, 1 / self.spec.count), None


@dataclass(frozen=True, kw_only=True)
class AltUpLayerConfig(LayerConfig):
    """A layer over alternating streams, with norms before and after each part and a post_block."""

    altup: AltUpConfig

    @property
    def _stream_kernels(self) -> int:
        return 12

    def build(self, weights: Weights, prefix: str, hidden: int, *, in_features: int | None = None) -> AltUpLayer:
        plain = super().build(weights, prefix, hidden, in_features=in_features)
        rank = self.altup.rank
        return AltUpLayer(
            **vars(plain),
            altup=_build_altup(weights, f"{prefix}.altup", hidden, self.altup, self.eps),
            left=weights.linear(f"{prefix}.laurel.linear_left", rank, hidden),
            right=weights.linear(f"{prefix}.laurel.linear_right", hidden, rank),
            learned_norm=weights.norm(f"{prefix}.laurel.post_laurel_norm", hidden, self.eps),
        )


def _build_altup(weights: Weights, name: str, hidden: int, config: AltUpConfig, eps: float) -> AltUp:
    """Turns the two small maps of m into maps to all weights of Ops.mix_streams: n weights of the sum, n of the
    addition, the mixing matrix by rows. The biases are the weights for m = 0."""
    count, router = config.count, f"{name}.modality_router.weight"
    router_weight = weights.get(router, count, hidden, precise=True)
    norm = weights.raw(f"{name}.router_norm.weight", (hidden,))
    predict = weights.raw(f"{name}.prediction_coefs.weight", (count * count, count))
    correct = weights.raw(f"{name}.correction_coefs.weight", (count, count))
    scale = weights.raw(f"{name}.correct_output_scale", (hidden,))
    identity, zeros = np.eye(count), np.zeros((count, count))
    active = identity[config.active]

    def expecting() -> NDArray[Any]:
        mixing = predict.float32().reshape(count, count, count).swapaxes(0, 1).reshape(-1, count)
        return np.concatenate((zeros, zeros, mixing))

    def correcting() -> NDArray[Any]:
        mixing = np.zeros((count, count, count))  # rows of the mixing matrix
        mixing[config.active] = -correct.float32()
        return np.concatenate((zeros, correct.float32(), mixing.reshape(-1, count)))

    biases: dict[str, tuple[NDArray[Any], ...]] = {
        "expect": (active, zeros[0], identity.ravel()),
        "correct": (active, zeros[0] + 1, (identity - active[:, None]).ravel()),
        "further": (active, 1 - identity[0], identity.ravel()),
    }
    vectors = {
        part: weights.constant(f"{name}.{part} of {config.active}", partial(np.concatenate, each))
        for part, each in biases.items()
    }
    linears = {
        part: Linear(weights.constant(f"{name}.{part}", each), vectors[part])
        for part, each in (("expect", expecting), ("correct", correcting))
    }
    return AltUp(
        spec=config.spec,
        norm=RMSNorm(weights.take(lambda: norm.affine(1 / hidden, 0), precise=True), eps),
        router=Linear(router_weight),
        prediction=linears["expect"],
        correction=linears["correct"],
        addition=vectors["further"],
        selector=_one_hot(weights, config.active, hidden),
        scale=weights.take(lambda: scale, precise=True) if config.scaled else None,
    )


@dataclass(frozen=True)
class AltUp:
    """Predicts streams before a layer's parts and corrects them after."""

    spec: StreamSpec
    norm: RMSNorm
    router: Linear
    prediction: Linear
    correction: Linear
    addition: Weight  # weights of Ops.mix_streams that add x to all streams but the first
    selector: Weight  # [H]: 1 at the active stream's index, else 0
    scale: Weight | None  # [H]

    def predict(self, ops: Ops, streams: Buffer, embedded: Buffer) -> tuple[Buffer, Buffer]:
        """Streams [R, n * H] -> (predicted streams [R, n * H], the predicted active stream [R, H])."""
        active = ops.sum_streams(streams, _constant(ops, embedded, self.selector), self.spec)
        weights = self.prediction(ops, self._modes(ops, active))
        predicted = ops.mix_streams(streams, active, weights, self.spec)
        return predicted, ops.sum_streams(predicted, weights, self.spec)

    def correct(self, ops: Ops, predicted: Buffer, output: Buffer) -> tuple[Buffer, Buffer, Buffer]:
        """(streams corrected by `output` [R, H], input of the post_block, weights of its output for the streams)."""
        weights = self.correction(ops, self._modes(ops, output))
        streams = ops.mix_streams(predicted, output, weights, self.spec)
        active = ops.sum_streams(streams, weights, self.spec)
        if self.scale is not None:
            active = ops.activate_mul(_constant(ops, active, self.scale), active, "identity")
        return streams, active, ops.add_bias(ops.scale(weights, 0.0), self.addition)

    def _modes(self, ops: Ops, x: Buffer) -> Buffer:
        return ops.softcap(self.router(ops, self.norm(ops, x)), 1.0)  # tanh


def _constant(ops: Ops, like: Buffer, values: Weight) -> Buffer:
    """`values` [W] in each row of a [R, W] buffer like `like`."""
    return ops.add_bias(ops.scale(like, 0.0), values)


@dataclass(frozen=True, kw_only=True)
class AltUpLayer(DecoderLayer):
    """A layer with AltUp and LAuReL (see the module)."""

    altup: AltUp
    left: Linear
    right: Linear
    learned_norm: RMSNorm

    def __call__(
        self, ops: Ops, delta: Buffer | None, residual: Buffer, positions: Buffer, pool: Pool,
        state: ForwardState | None = None,
    ) -> tuple[None, Buffer]:  # fmt: skip
        assert delta is None and state and self.post_block, "AltUp layers only work in a trunk"
        predicted, x = self.altup.predict(ops, residual, state.embedded)
        normed = self.input_norm(ops, x)
        learned = ops.add(normed, self.learned_norm(ops, self.right(ops, self.left(ops, normed))))
        mixed = ops.add(x, self.mixer_norm(ops, self.mixer(ops, normed, positions, pool)))
        x = ops.scale(ops.add(mixed, learned), sqrt(0.5))
        output = ops.add(x, self.mlp_norm(ops, self.mlp(ops, self.post_norm(ops, x))))
        streams, active, addition = self.altup.correct(ops, predicted, output)
        added = self.post_block(ops, active, state.token_ids, state.embedded)
        return None, ops.mix_streams(streams, added, addition, self.altup.spec)
