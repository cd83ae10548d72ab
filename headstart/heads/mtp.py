"""MTP (DeepSeek-V3 report, section 2.2): a hidden state and the next token through one block; used again for every
draft step, or a module for each.

x = W [norm_e(e(t_{p+1})) ; norm_h(h_p)], x' = Block(x), y = norm(x'), logits = head(y); the next draft step reads the
*recycled* vector (y or x') in place of h. Canonical tensors: `mtp.{i}.` norm_embedding, norm_hidden, projection, block,
norm (or none: y = x'),
lm_head (or none: the trunk's). Of a trunk with residual streams the hidden state is all of them: each makes an x of its
own, the block mixes them, and `streams` sums them before the norm (DeepSeek-V4).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import numpy as np

from headstart.heads.base import FIRST_PAIR_POSITION, HeadSpec
from headstart.heads.kind import EMBEDDING_SHARE, HeadKind, Start, Training, Values
from headstart.kernels.ops import Buffer, KVSpec, Ops, Pool, StepInputs
from headstart.layers.decoder import DecoderLayer, LayerConfig
from headstart.layers.linear import Linear
from headstart.layers.norm import NoNorm, Norm, RMSNorm
from headstart.layers.streams import Streams, read_streams, repeated, stream_shapes
from headstart.layers.weights import Shapes, Weights


@dataclass(frozen=True)
class MTPModule:
    """One prediction module; the LM head is the caller's (the trunk's, or its rows of a draft vocabulary)."""

    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    projection: Linear
    block: DecoderLayer
    norm: Norm
    streams: Streams | None = None

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        return self.block.mixer.kv_specs

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]:
        """As heads.base.Module; a recycled vector is read as a trunk hidden state is."""
        if spec.mask_first:
            embedded = ops.zero_where(embedded, step.positions, FIRST_PAIR_POSITION)
        e, h = self.embedding_norm(ops, embedded), self.hidden_norm(ops, step.hidden)
        if self.streams:
            return self._in_streams(ops, spec, self.streams, e, h, step, pool)
        x = self.projection(ops, ops.concat(h, e) if spec.hidden_first else ops.concat(e, h))
        delta, residual = self.block(ops, None, x, step.positions, pool)
        y, stream = self.norm.add(ops, delta, residual)
        return y, y if spec.recycle == "post_norm" else stream

    def _in_streams(
        self, ops: Ops, spec: HeadSpec, streams: Streams, e: Buffer, h: Buffer, step: StepInputs, pool: Pool
    ) -> tuple[Buffer, Buffer]:
        count = streams.spec.count
        wide = h if spec.tap == "streams" else repeated(ops, h, count)
        pairs = ops.concat(repeated(ops, e, count), wide, count)
        x = ops.head_linear(pairs, (self.projection.weight,) * count)
        _, mixed = self.block(ops, None, x, step.positions, pool)
        stream, _ = streams.enter(ops, mixed)
        y = self.norm(ops, stream)
        return y, {"post_norm": y, "pre_norm": stream, "streams": mixed}[spec.recycle]


def _streams(weights: Weights, prefix: str, hidden: int, layer: LayerConfig) -> Streams | None:
    return read_streams(weights, prefix, hidden, layer.streams, layer.eps, last=True) if layer.streams else None


def _projection(weights: Weights, name: str, hidden: int, layer: LayerConfig) -> Linear:
    """That of every stream by itself stays floats, as matrices of heads do."""
    if layer.streams is None:
        return weights.linear(name, hidden, 2 * hidden)
    return Linear(weights.take(weights.raw(f"{name}.weight", (hidden, 2 * hidden)).plain(), precise=True))


def modules(weights: Weights, spec: HeadSpec, hidden: int) -> Seq[MTPModule]:
    assert spec.layer is not None
    norm = partial(weights.norm, size=hidden, eps=spec.layer.eps, centered=spec.layer.centered)
    return [
        MTPModule(
            embedding_norm=norm(f"mtp.{i}.norm_embedding"),
            hidden_norm=norm(f"mtp.{i}.norm_hidden"),
            projection=_projection(weights, f"mtp.{i}.projection", hidden, spec.layer),
            block=spec.layer.build(weights, f"mtp.{i}.block", hidden),
            norm=norm(f"mtp.{i}.norm") if spec.output_norm else NoNorm(),
            streams=_streams(weights, f"mtp.{i}.streams", hidden, spec.layer),
        )
        for i in range(spec.num_modules)
    ]


def lm_heads(weights: Weights, spec: HeadSpec, rows: int, hidden: int) -> Seq[Linear]:
    """Of each module, where they have their own."""
    count = spec.num_modules if spec.own_lm_head else 0
    return [weights.linear(f"mtp.{i}.lm_head", rows, hidden) for i in range(count)]


def shapes(spec: HeadSpec, hidden: int) -> Shapes:
    assert spec.layer is not None
    every: Shapes = {}
    for prefix in (f"mtp.{i}" for i in range(spec.num_modules)):
        norms = ("norm_embedding", "norm_hidden", *(("norm",) if spec.output_norm else ()))
        every |= {f"{prefix}.{name}.weight": (hidden,) for name in norms}
        every[f"{prefix}.projection.weight"] = (hidden, 2 * hidden)
        if spec.own_lm_head:
            every[f"{prefix}.lm_head.weight"] = (spec.own_lm_head, hidden)
        every |= spec.layer.shapes(f"{prefix}.block", hidden)
        if spec.layer.streams:
            every |= stream_shapes(f"{prefix}.streams", hidden, spec.layer.streams, last=True)
    return every


def initial(start: Start, spec: HeadSpec) -> dict[str, Values]:
    """Block and final norm from the trunk's last layer, which reads a stream whose rms is about `scale`; the token's
    embedding enters at EMBEDDING_SHARE of that."""
    width = len(start.norm)
    scale, eye = np.full(width, start.scale, np.float32), np.eye(width, dtype=np.float32)
    halves = (np.float32(EMBEDDING_SHARE) * eye, eye)
    module = {f"block.{name}": values for name, values in start.layer().items()} | {
        "norm_embedding.weight": scale,
        "norm_hidden.weight": scale,
        "projection.weight": np.hstack(halves[::-1] if spec.hidden_first else halves),
        "norm.weight": np.float32(0.5) * start.norm,  # modest logits: the first guesses are wrong
    }
    return {f"mtp.{i}.{name}": values for i in range(spec.num_modules) for name, values in module.items()}


HEAD = HeadKind(
    title="MTP",
    modules=modules,
    shapes=shapes,
    lm_heads=lm_heads,
    # the stream before the final norm, as in the one dense family that vLLM drafts for (vllm_mimo)
    training=Training(spec=lambda layers, depth: HeadSpec(tap="pre_norm"), initial=initial, stacks=True, random=True),
)
