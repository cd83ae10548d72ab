"""Alternating updates (AltUp; Baykal et al. 2023) and learned residuals (LAuReL; Menghani et al. 2024), as Gemma 3n has
them: of several streams side by side each layer works on one and moves the others along. Formula: transformers 5.23,
`modeling_gemma3n.py`. With m(x) = tanh(W norm(x) / H), and `a` the stream that is worked on:

    p_k = x_k + sum over j of (P m(x_a))_kj x_j                                               what is expected
    r = norm(p_a);  s = (p_a + norm(mixer(r)) + r + norm(right(left(r)))) / sqrt(2);  y = s + norm(mlp(norm(s)))
    c_k = p_k + (1 + (C m(y))_k) (y - p_a);  x_k = c_k + [k > 0] beside(scale * c_a)

In the beginning stream 0 is the embedding e, and stream k is P_k e made as long as e. In the end each U_k x_k is made
as long as x_0, and the mean of all goes on.

Canonical tensors: `altup_projections.{k - 1}.weight` and `altup_unembed_projections.{k - 1}.weight` [H, H]; under
`{layer}.altup`: `modality_router.weight` [n, H], `router_norm.weight` [H], `prediction_coefs.weight` [n * n, n],
`correction_coefs.weight` [n, n], `correct_output_scale` [H]; under `{layer}.laurel`: `linear_left.weight` [rank, H],
`linear_right.weight` [H, rank], `post_laurel_norm.weight` [H].
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.kernels.ops import Buffer, Ops, Pool, Weight
from headstart.kernels.specs import StreamSpec
from headstart.layers.decoder import DecoderLayer, LayerConfig, Passing
from headstart.layers.linear import Linear
from headstart.layers.magnitude import Magnitude, read_magnitude
from headstart.layers.norm import RMSNorm
from headstart.layers.weights import Shapes, Weights

BEGIN, END = "altup_projections", "altup_unembed_projections"


@dataclass(frozen=True, kw_only=True)
class AltUpConfig:
    """`count` streams, of which layers work on `active`; `rank` of the learned residual; `scaled`: what a layer's part
    beside reads is multiplied by a vector."""

    count: int
    active: int
    rank: int
    scaled: bool = True

    @property
    def spec(self) -> StreamSpec:
        return StreamSpec(self.count, 0, 0.0)

    def build(self, weights: Weights, hidden: int) -> AltUpEnds:
        """Both ends of the layers."""
        begin, end = (
            tuple(weights.linear(f"{name}.{k}", hidden, hidden) for k in range(self.count - 1)) for name in (BEGIN, END)
        )
        picks = np.zeros((self.count, self.count * hidden))
        picks[:, : self.count] = np.eye(self.count)
        picked = tuple(weights.made(f"pick {k}", pick) for k, pick in enumerate(picks))
        return AltUpEnds(self.spec, begin, end, picked, read_magnitude(weights, hidden))

    def shapes(self, hidden: int) -> Shapes:
        """Names and shapes of what `build` takes."""
        return {f"{name}.{k}.weight": (hidden, hidden) for name in (BEGIN, END) for k in range(self.count - 1)}


@dataclass(frozen=True)
class AltUpEnds:
    """One stream to all and back. `picks`: by stream, vectors [n * H] whose first n numbers are 1 for it, else 0."""

    spec: StreamSpec
    into: tuple[Linear, ...]
    out: tuple[Linear, ...]
    picks: tuple[Weight, ...]
    magnitude: Magnitude

    def begin(self, ops: Ops, x: Buffer) -> Buffer:
        """[R, H] -> [R, n * H]."""
        _, length = self.magnitude.apart(ops, x)
        wide = x
        for linear in self.into:
            wide = ops.concat(wide, self.magnitude.of(ops, linear(ops, x), length))
        return wide

    def enter(self, ops: Ops, streams: Buffer) -> tuple[Buffer, None]:
        """[R, n * H] -> their mean [R, H]."""
        zero = ops.scale(streams, 0.0)
        total, *others = (ops.sum_streams(streams, ops.shift(zero, pick), self.spec) for pick in self.picks)
        _, length = self.magnitude.apart(ops, total)
        for linear, other in zip(self.out, others, strict=True):
            total = ops.add(total, self.magnitude.of(ops, linear(ops, other), length))
        return ops.scale(total, 1 / self.spec.count), None


@dataclass(frozen=True, kw_only=True)
class AltUpLayerConfig(LayerConfig):
    """A layer over alternating streams; it has norms before and after each part, and a part beside."""

    altup: AltUpConfig

    def build(self, weights: Weights, prefix: str, hidden: int, *, reads: int | None = None) -> AltUpLayer:
        plain = super().build(weights, prefix, hidden, reads=reads)
        rank = self.altup.rank
        return AltUpLayer(
            **{field.name: getattr(plain, field.name) for field in fields(plain)},
            altup=_read(weights, f"{prefix}.altup", hidden, self.altup, self.eps),
            left=weights.linear(f"{prefix}.laurel.linear_left", rank, hidden),
            right=weights.linear(f"{prefix}.laurel.linear_right", hidden, rank),
            learned_norm=weights.norm(f"{prefix}.laurel.post_laurel_norm", hidden, self.eps),
        )

    def shapes(self, prefix: str, hidden: int, *, reads: int | None = None) -> Shapes:
        rank = self.altup.rank
        return {
            **super().shapes(prefix, hidden, reads=reads),
            **_shapes(f"{prefix}.altup", hidden, self.altup.count),
            f"{prefix}.laurel.linear_left.weight": (rank, hidden),
            f"{prefix}.laurel.linear_right.weight": (hidden, rank),
            f"{prefix}.laurel.post_laurel_norm.weight": (hidden,),
        }


def _shapes(name: str, hidden: int, count: int) -> Shapes:
    return {
        f"{name}.modality_router.weight": (count, hidden),
        f"{name}.router_norm.weight": (hidden,),
        f"{name}.prediction_coefs.weight": (count * count, count),
        f"{name}.correction_coefs.weight": (count, count),
        f"{name}.correct_output_scale": (hidden,),
    }


def _read(weights: Weights, name: str, hidden: int, config: AltUpConfig, eps: float) -> AltUp:
    """The two small maps of m become ones to all weights of Ops.mix_streams: [1 for the stream that is worked on, n of
    what is added, the mixing matrix by rows]; a bias is what holds where m is 0."""
    count, shapes = config.count, _shapes(name, hidden, config.count)
    expects = weights.raw(f"{name}.prediction_coefs.weight", (count * count, count)).float32()
    corrects = weights.raw(f"{name}.correction_coefs.weight", (count, count)).float32()
    scale = weights.raw(f"{name}.correct_output_scale", (hidden,))
    here, none, keep = np.eye(count)[config.active], np.zeros(count), np.eye(count)
    nothing = np.zeros((count, count))
    instead = np.zeros((count, count, count))  # of the mixing matrix, row by row
    instead[config.active] = -corrects
    maps: dict[str, tuple[NDArray[Any], ...]] = {
        "expect": (nothing, nothing, expects.reshape(count, count, count).swapaxes(0, 1).reshape(-1, count)),
        "correct": (nothing, corrects, instead.reshape(-1, count)),
    }
    biases: dict[str, tuple[NDArray[Any], ...]] = {
        "expect": (here, none, keep.ravel()),
        "correct": (here, none + 1, (keep - here[:, None]).ravel()),
        "further": (here, 1 - np.eye(count)[0], keep.ravel()),
    }
    vectors = {
        part: weights.made(f"{name}.{part} of {config.active}", np.concatenate(each)) for part, each in biases.items()
    }
    linears = {
        part: Linear(weights.made(f"{name}.{part}", np.concatenate(each)), vectors[part]) for part, each in maps.items()
    }
    norm = weights.raw(f"{name}.router_norm.weight", (hidden,)).affine(1 / hidden, 0)
    router = f"{name}.modality_router.weight"
    return AltUp(
        spec=config.spec,
        norm=RMSNorm(weights.take(norm, precise=True), eps),
        router=Linear(weights.get(router, *shapes[router], precise=True)),
        expect=linears["expect"],
        correct=linears["correct"],
        further=vectors["further"],
        pick=weights.made(f"pick {config.active} of {hidden}", np.arange(hidden) == config.active),
        scale=weights.take(scale, precise=True) if config.scaled else None,
    )


@dataclass(frozen=True)
class AltUp:
    """How streams move before and behind what a layer does to one of them. `pick` [H]: 1 for that one, else 0;
    `further`: weights of Ops.mix_streams that add x to all streams but the first."""

    spec: StreamSpec
    norm: RMSNorm
    router: Linear
    expect: Linear
    correct: Linear
    further: Weight
    pick: Weight
    scale: Weight | None

    def before(self, ops: Ops, streams: Buffer, embedded: Buffer) -> tuple[Buffer, Buffer]:
        """Streams [R, n * H] -> what is expected of all, and of the one that is worked on [R, H]."""
        active = ops.sum_streams(streams, _constant(ops, embedded, self.pick), self.spec)
        weights = self.expect(ops, self._modes(ops, active))
        expected = ops.mix_streams(streams, active, weights, self.spec)
        return expected, ops.sum_streams(expected, weights, self.spec)

    def behind(self, ops: Ops, expected: Buffer, said: Buffer) -> tuple[Buffer, Buffer, Buffer]:
        """Streams corrected by what came out, what the part beside reads, and weights for `beside`."""
        weights = self.correct(ops, self._modes(ops, said))
        streams = ops.mix_streams(expected, said, weights, self.spec)
        active = ops.sum_streams(streams, weights, self.spec)
        if self.scale is not None:
            active = ops.activate_mul(_constant(ops, active, self.scale), active, "identity")
        return streams, active, ops.shift(ops.scale(weights, 0.0), self.further)

    def _modes(self, ops: Ops, x: Buffer) -> Buffer:
        return ops.softcap(self.router(ops, self.norm(ops, x)), 1.0)  # tanh


def _constant(ops: Ops, like: Buffer, values: Weight) -> Buffer:
    """The same values [W] in each row [R, W]."""
    return ops.shift(ops.scale(like, 0.0), values)


@dataclass(frozen=True, kw_only=True)
class AltUpLayer(DecoderLayer):
    """See the module."""

    altup: AltUp
    left: Linear
    right: Linear
    learned_norm: RMSNorm

    def __call__(
        self,
        ops: Ops,
        delta: Buffer | None,
        residual: Buffer,
        positions: Buffer,
        pool: Pool,
        passing: Passing | None = None,
    ) -> tuple[None, Buffer]:
        assert delta is None and passing and self.beside, "all streams, in a trunk"
        expected, x = self.altup.before(ops, residual, passing.embedded)
        read = self.input_norm(ops, x)
        learned = ops.add(read, self.learned_norm(ops, self.right(ops, self.left(ops, read))))
        mixed = ops.add(x, self.mixer_norm(ops, self.mixer(ops, read, positions, pool)))
        x = ops.scale(ops.add(mixed, learned), sqrt(0.5))
        said = ops.add(x, self.mlp_norm(ops, self.mlp(ops, self.post_norm(ops, x))))
        streams, active, further = self.altup.behind(ops, expected, said)
        beside = self.beside(ops, active, passing.token_ids, passing.embedded)
        return None, ops.mix_streams(streams, beside, further, self.altup.spec)
