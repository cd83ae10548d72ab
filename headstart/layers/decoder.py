"""The pre-norm decoder block and the stack of blocks that most families share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from headstart.kernels.ops import AttentionSpec, Buffer, Ops, Pool, Program, StepInputs, Weight
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm

Tap = Literal["post_norm", "pre_norm"] | tuple[int, ...]
"""Which trunk hidden state a head reads: after or before the final norm, or the streams that enter these layers,
side by side."""


def tap_width(tap: Tap, hidden_size: int) -> int:
    """Columns of a stored hidden state."""
    return hidden_size * max(len(tapped_layers(tap)), 1)


def tapped_layers(tap: Tap) -> tuple[int, ...]:
    """The layers whose streams are tapped; none for a final state."""
    return tap if isinstance(tap, tuple) else ()


class Mixer(Protocol):
    """What mixes positions in a block: attention of one kind or another."""

    @property
    def spec(self) -> AttentionSpec:
        """What its KV pool holds."""

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer: ...


class FeedForward(Protocol):
    """What works on each row by itself: one gated MLP, or a mixture of experts."""

    def __call__(self, ops: Ops, x: Buffer) -> Buffer: ...


@dataclass(frozen=True)
class DecoderLayer:
    """x + attention(norm(x)), then + mlp(norm(.)); the residual sum of a block is left to the next norm."""

    input_norm: RMSNorm
    attention: Mixer
    post_norm: RMSNorm
    mlp: FeedForward

    def __call__(
        self, ops: Ops, delta: Buffer | None, residual: Buffer, positions: Buffer, pool: Pool
    ) -> tuple[Buffer, Buffer]:
        """(delta, residual) -> (delta, residual); the stream's value is their sum."""
        if delta is None:
            x = self.input_norm(ops, residual)
        else:
            x, residual = self.input_norm.add(ops, delta, residual)
        x, residual = self.post_norm.add(ops, self.attention(ops, x, positions, pool), residual)
        return self.mlp(ops, x), residual


@dataclass(frozen=True)
class Decoder:
    """Embedding, blocks, final norm, LM head: a whole trunk."""

    embedding: Weight
    layers: list[DecoderLayer]
    norm: RMSNorm
    lm_head: Linear

    @property
    def kv_specs(self) -> list[AttentionSpec]:
        """One KV pool per block."""
        return [layer.attention.spec for layer in self.layers]

    def program(self, kv_pools: list[Pool], hidden_pool: Pool = None, tap: Tap = "post_norm") -> Program:
        """The forward over `kv_pools`; `hidden_pool` None keeps no hidden states."""
        return DecoderProgram(self, kv_pools, hidden_pool, tap)


@dataclass(frozen=True)
class DecoderProgram:
    """Results: `logits` [L, V]; `hidden` [R, H] after the final norm; `tapped` [R, taps x H] where there are taps."""

    model: Decoder
    kv_pools: list[Pool]
    hidden_pool: Pool = None
    tap: Tap = "post_norm"

    def __call__(self, ops: Ops, step: StepInputs) -> dict[str, Buffer]:
        model = self.model
        delta, residual = None, ops.embed(model.embedding, step.token_ids)
        wanted = tapped_layers(self.tap)
        tapped: Buffer | None = None
        for i, (layer, pool) in enumerate(zip(model.layers, self.kv_pools, strict=True)):
            if i in wanted:
                stream = residual if delta is None else ops.add(delta, residual)
                tapped = stream if tapped is None else ops.concat(tapped, stream)
            delta, residual = layer(ops, delta, residual, step.positions, pool)
        hidden, residual = model.norm.add(ops, delta, residual)
        if self.hidden_pool is not None:
            ops.store(tapped if wanted else hidden if self.tap == "post_norm" else residual, self.hidden_pool)
        logits = model.lm_head(ops, ops.take_rows(hidden, step.logit_rows))
        return {"logits": logits, "hidden": hidden, **({"tapped": tapped} if wanted else {})}
