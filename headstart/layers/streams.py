"""Manifold-constrained hyper-connections (Xie et al. 2026; DeepSeek-V4 report, section 2.2): several residual streams
side by side. Before a part of a layer they are summed to one, behind it they are mixed and each gets a share.

mixes = W (x / rms(x)) of all streams x together; what is made of them: Ops.stream_weights. Before the final norm, and
at the end of an MTP module, the streams are summed once more. Formula: transformers 5.23, `DeepseekV4HyperConnection`
and `DeepseekV4HyperHead`.

Canonical tensors under a prefix: `fn` [mixes, streams * H], `base` [mixes], `scale` [3] (of a sum alone: [1]).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headstart.kernels.ops import Buffer, Ops, Weight
from headstart.kernels.specs import StreamSpec
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.weights import Shapes, Weights


class Spread(Protocol):
    """How one stream becomes several before the first layer, and one again behind the last."""

    @property
    def spec(self) -> StreamSpec: ...

    def begin(self, ops: Ops, x: Buffer) -> Buffer:
        """[R, H] -> [R, streams * H]."""

    def enter(self, ops: Ops, streams: Buffer) -> tuple[Buffer, Buffer | None]:
        """[R, streams * H] -> [R, H], and what `Streams.leave` wants."""


@dataclass(frozen=True)
class Streams:
    """How streams enter a part and leave it."""

    spec: StreamSpec
    norm: RMSNorm
    mixes: Linear
    base: Weight
    scale: Weight

    def begin(self, ops: Ops, x: Buffer) -> Buffer:
        """[R, H] -> [R, streams * H], before the first layer."""
        return repeated(ops, x, self.spec.count)

    def enter(self, ops: Ops, streams: Buffer) -> tuple[Buffer, Buffer]:
        """[R, streams * H] -> (their sum [R, H], weights for `leave`)."""
        mixes = self.mixes(ops, self.norm(ops, streams))
        weights = ops.stream_weights(mixes, self.base, self.scale, self.spec)
        return ops.sum_streams(streams, weights, self.spec), weights

    def leave(self, ops: Ops, streams: Buffer, x: Buffer, weights: Buffer) -> Buffer:
        """Streams [R, streams * H] behind a part that made x [R, H] of their sum."""
        return ops.mix_streams(streams, x, weights, self.spec)


def read_streams(
    weights: Weights, prefix: str, hidden: int, spec: StreamSpec, eps: float, *, last: bool = False
) -> Streams:
    """From the tensors under `prefix`; `last`: nothing leaves."""
    wide = spec.count * hidden
    shapes = stream_shapes(prefix, hidden, spec, last=last)
    fn, base, scale = (f"{prefix}.{name}" for name in ("fn", "base", "scale"))
    return Streams(
        spec=spec,
        norm=weights.plain_norm(wide, eps),
        mixes=Linear(weights.get(fn, *shapes[fn], precise=True)),
        base=weights.get(base, *shapes[base]),
        scale=weights.get(scale, *shapes[scale]),
    )


def stream_shapes(prefix: str, hidden: int, spec: StreamSpec, *, last: bool = False) -> Shapes:
    """Names and shapes of what `read_streams` takes."""
    count = spec.count if last else spec.num_mixes
    return {
        f"{prefix}.fn": (count, spec.count * hidden),
        f"{prefix}.base": (count,),
        f"{prefix}.scale": (1 if last else 3,),
    }


def repeated(ops: Ops, x: Buffer, count: int) -> Buffer:
    """[R, H] -> [R, count * H]: the same in each stream."""
    wide = x
    for _ in range(count - 1):
        wide = ops.concat(wide, x)
    return wide
