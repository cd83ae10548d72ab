"""Manifold-constrained hyper-connections (Xie et al. 2026; DeepSeek-V4 report, section 2.2): several residual streams.

Before a part of a layer the streams are summed to one; after it they are mixed, and each gets a share of the output.
mixes = W (x / rms(x)) with x all streams together; Ops.stream_weights turns them into the weights of sums and mixing.
The streams are summed once more before the final norm and at the end of an MTP module. In HY-V4 streams are not mixed;
in GLM-5.3 the last sum is the mean. In DeepSeek-V4.1 each sum takes the input weights of the part before: the first
part reads stream 0, and the last sum takes the weights of the last part. Formula: transformers 5.23,
`DeepseekV4HyperConnection`, `DeepseekV4HyperHead`.

Canonical tensors under a prefix: `fn` [mixes, streams * H], `base` [mixes], `scale` [3] (not mixed: [2]; of a sum
alone: [1]).

In Qwen3.8-Flash-Next gates of low rank weigh every feature of the normed streams (GatedStreams). With n streams s:

    y = norm(s) (each stream by itself);  x = mean over streams of sigmoid(U silu(D y / n)) * y
    stream k += 2 sigmoid(I y / n)_k part(x)

Formula: transformers 5.24, `Qwen4ExpTextGatedResidual`. Canonical tensors: `hc_norm.weight` [n * H],
`input_mix_weight_down.weight` D [rank, n * H], `input_mix_weight_up.weight` U [n * H, rank] and, but for the last sum,
`block_inject_weight.weight` I [n, n * H].
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from headstart.kernels.ops import Buffer, Ops, Weight
from headstart.kernels.specs import StreamSpec
from headstart.layers.linear import Linear
from headstart.layers.norm import GroupedRMSNorm, RMSNorm
from headstart.layers.weights import Weights

DOWN, UP, INJECT = "input_mix_weight_down", "input_mix_weight_up", "block_inject_weight"


class StreamExpansion:
    """From one residual stream to several before the first layer, and back to one after the last."""

    spec: StreamSpec

    def expand(self, ops: Ops, x: Buffer) -> Buffer:
        """[R, H] -> [R, streams * H]: equal streams."""
        return repeat_streams(ops, x, self.spec.count)

    def collapse(self, ops: Ops, streams: Buffer, before: Buffer | None = None) -> tuple[Buffer, Buffer | None]:
        """[R, streams * H] -> ([R, H], weights for `StreamMixer.distribute`). before: weights of the part before,
        if sums are delayed."""
        raise NotImplementedError

    def tapped(self, ops: Ops, streams: Buffer, layer: Any, *, sums: bool) -> Buffer:
        """[R, streams * H] before `layer` (None: after the last one) -> their mean [R, H], which a drafter reads. sums:
        see layers.decoder.SumTaps."""
        return ops.sum_streams(streams, None, self.spec)


@dataclass(frozen=True)
class UnweightedLastSum(StreamExpansion):
    """The sum of the streams after the last layer, without weights of its own: the mean, or by the weights of the last
    part if sums are delayed."""

    spec: StreamSpec

    def collapse(self, ops: Ops, streams: Buffer, before: Buffer | None = None) -> tuple[Buffer, None]:
        return ops.sum_streams(streams, before, self.spec), None


class StreamMixer(StreamExpansion):
    """Sums the streams before a part of a layer and mixes them after it."""

    def distribute(self, ops: Ops, streams: Buffer, x: Buffer, weights: Buffer) -> Buffer:
        """Streams [R, streams * H] after a part whose output is x [R, H]."""
        return ops.mix_streams(streams, x, weights, self.spec)


@dataclass(frozen=True)
class HyperConnection(StreamMixer):
    """Weights of sums and mixing from all streams together; formula in the module's docstring."""

    spec: StreamSpec
    norm: RMSNorm
    mixes: Linear
    base: Weight
    scale: Weight

    def collapse(self, ops: Ops, streams: Buffer, before: Buffer | None = None) -> tuple[Buffer, Buffer]:
        mixes = self.mixes(ops, self.norm(ops, streams))
        weights = ops.stream_weights(mixes, self.base, self.scale, self.spec)
        if self.spec.delayed:
            width = len(self.norm.weight) // self.spec.count
            first = ops.columns(streams, 0, width) if before is None else ops.sum_streams(streams, before, self.spec)
            return first, weights
        return ops.sum_streams(streams, weights, self.spec), weights


@dataclass(frozen=True)
class GatedStreams(StreamMixer):
    """A mean of the streams, weighed by low-rank gates; formula in the module's docstring."""

    spec: StreamSpec
    norm: GroupedRMSNorm
    down: Linear
    up: Linear
    inject: Linear | None  # twice the rows, as Ops.stream_weights takes them; None: of the last sum
    base: Weight
    scale: Weight

    def collapse(self, ops: Ops, streams: Buffer, before: Buffer | None = None) -> tuple[Buffer, Buffer | None]:
        normed = self.norm(ops, streams)
        inner = ops.activate(ops.scale(self.down(ops, normed), 1 / self.spec.count), "silu")
        x = ops.sum_streams(ops.sigmoid_mul(self.up(ops, inner), normed), None, self.spec)
        if self.inject is None:
            return x, None
        return x, ops.stream_weights(self.inject(ops, normed), self.base, self.scale, self.spec)


def build_hyper_connection(
    weights: Weights, prefix: str, hidden: int, spec: StreamSpec, eps: float, *, last: bool = False
) -> StreamMixer:
    """Builds it from the tensors under `prefix`; `last`: the final sum, without `distribute`."""
    wide = spec.count * hidden
    if spec.gate_rank:
        return _build_gated(weights, prefix, wide, spec, eps, last=last)
    count = spec.count if last else spec.num_mixes
    return HyperConnection(
        spec=spec, norm=weights.unweighted_norm(wide, eps),
        mixes=Linear(weights.get(f"{prefix}.fn", count, wide, precise=True)),
        base=weights.get(f"{prefix}.base", count),
        scale=weights.get(f"{prefix}.scale", 1 if last else spec.num_scales),
    )  # fmt: skip


def _build_gated(weights: Weights, prefix: str, wide: int, spec: StreamSpec, eps: float, *, last: bool) -> GatedStreams:
    count, name = spec.count, f"{prefix}.{INJECT}.weight"
    twice = np.tile(np.arange(count, dtype=np.int64), 2)

    def twofold() -> Linear:
        matrix = weights.raw(name, (count, wide))
        return Linear(weights.take(lambda: matrix.take_rows(twice), precise=True))

    return GatedStreams(
        spec=spec, norm=GroupedRMSNorm(weights.get(f"{prefix}.hc_norm.weight", wide), eps, count),
        down=weights.linear(f"{prefix}.{DOWN}", spec.gate_rank, wide),
        up=weights.linear(f"{prefix}.{UP}", wide, spec.gate_rank), inject=None if last else twofold(),
        base=weights.zeros(2 * count), scale=weights.filled(1 / count, 2),
    )  # fmt: skip


def build_last_sum(weights: Weights, hidden: int, spec: StreamSpec, eps: float) -> StreamExpansion:
    """The sum of the streams after the last layer, from the tensors under `streams`."""
    if not spec.weighted_end:
        return UnweightedLastSum(spec)
    return build_hyper_connection(weights, "streams", hidden, spec, eps, last=True)


def repeat_streams(ops: Ops, x: Buffer, count: int) -> Buffer:
    """[R, H] -> [R, count * H]: `count` copies."""
    wide = x
    for _ in range(count - 1):
        wide = ops.concat(wide, x)
    return wide
