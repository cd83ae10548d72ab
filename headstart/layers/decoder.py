"""The pre-norm decoder block and the stack of blocks that most families share."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, Protocol

from headstart.kernels.ops import AttentionSpec, Buffer, Ops, Pool, Program, StateSpec, StepInputs, Weight
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
    """What mixes positions in a block: attention of one kind or another, or a recurrence over states."""

    @property
    def spec(self) -> AttentionSpec | None:
        """What its KV pool holds; None: it has none."""

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """Of the states it keeps; its pool is then a tuple of theirs."""

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
        """One KV pool per block that attends."""
        return [layer.attention.spec for layer in self.layers if layer.attention.spec]

    @property
    def state_specs(self) -> list[StateSpec]:
        """One state pool each."""
        return [spec for layer in self.layers for spec in layer.attention.state_specs]

    def program(
        self, kv_pools: Seq[Pool], hidden_pool: Pool = None, tap: Tap = "post_norm", state_pools: Seq[Pool] = ()
    ) -> Program:
        """The forward over the pools of kv_specs and state_specs; `hidden_pool` None keeps no hidden states."""
        kv, states = iter(kv_pools), iter(state_pools)
        pools: list[Pool] = []
        for mixer in [layer.attention for layer in self.layers]:
            pools.append(next(kv) if mixer.spec else tuple(next(states) for _ in mixer.state_specs))
        return DecoderProgram(self, pools, hidden_pool, tap)


@dataclass(frozen=True)
class DecoderProgram:
    """Results: `logits` [L, V]; `hidden` [R, H] after the final norm; `tapped` [R, taps x H] where there are taps."""

    model: Decoder
    pools: list[Pool]
    hidden_pool: Pool = None
    tap: Tap = "post_norm"

    def __call__(self, ops: Ops, step: StepInputs) -> dict[str, Buffer]:
        model = self.model
        delta, residual = None, ops.embed(model.embedding, step.token_ids)
        wanted = tapped_layers(self.tap)
        tapped: Buffer | None = None
        for i, (layer, pool) in enumerate(zip(model.layers, self.pools, strict=True)):
            if i in wanted:
                stream = residual if delta is None else ops.add(delta, residual)
                tapped = stream if tapped is None else ops.concat(tapped, stream)
            delta, residual = layer(ops, delta, residual, step.positions, pool)
        hidden, residual = model.norm.add(ops, delta, residual)
        if self.hidden_pool is not None:
            ops.store(tapped if wanted else hidden if self.tap == "post_norm" else residual, self.hidden_pool)
        logits = model.lm_head(ops, ops.take_rows(hidden, step.logit_rows))
        return {"logits": logits, "hidden": hidden, **({"tapped": tapped} if wanted else {})}
