"""Multi-token-prediction modules: a trunk hidden state and the next token in, a guess of the token after it out.

x = W [norm_e(e(t_{p+1})) ; norm_h(h_p)], x' = Block(x), y = norm_out(x'), logits = head(y); the next draft step reads
the *recycled* vector (y or x') in place of h (DeepSeek-V3 report, section 2.2). Families differ in declared data only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Protocol

from headstart.kernels.ops import AttentionSpec, Buffer, Ops, Pool, Program, StepInputs, Weight
from headstart.layers.decoder import DecoderLayer, Tap
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm

FIRST_PAIR_POSITION = 1
"""The pair (h_p, t_{p+1}) lives at position p + 1, so pair 0 is at 1 (DESIGN section 5)."""


@dataclass(frozen=True)
class HeadSpec:
    """What an MTP head declares about itself.

    `hidden_first`: concat order [h ; e] instead of [e ; h]. `mask_first`: the embedding of pair 0 is zeroed.
    `beyond`: which module serves draft steps past the last one; None refuses such depths unless there is one module.
    """

    hidden_first: bool = False
    mask_first: bool = False
    tap: Tap = "post_norm"
    recycle: Tap = "post_norm"
    num_modules: int = 1
    beyond: Literal["last", "cycle"] | None = None

    @staticmethod
    def of(declared: object) -> HeadSpec:
        """From anything that has these fields as attributes, such as a head's config."""
        return HeadSpec(**{each.name: getattr(declared, each.name) for each in fields(HeadSpec)})

    def module_of(self, step: int) -> int | None:
        """The module that serves draft step `step` (0-based); None when the head declares none."""
        if step < self.num_modules:
            return step
        if self.num_modules == 1 or self.beyond == "last":
            return self.num_modules - 1
        return step % self.num_modules if self.beyond == "cycle" else None

    def rows_before(self, step: int) -> int:
        """Rows that lie between the true pairs and the row of draft step `step` >= 1 in the KV of the step's module: of
        earlier steps that the same module served."""
        return sum(self.module_of(each) == self.module_of(step) for each in range(1, step))


@dataclass(frozen=True)
class MTPModule:
    """One prediction module; the LM head is the caller's (the trunk's, or its rows of a draft vocabulary)."""

    embedding_norm: RMSNorm
    hidden_norm: RMSNorm
    projection: Linear
    block: DecoderLayer
    norm: RMSNorm

    @property
    def kv_spec(self) -> AttentionSpec | None:
        return self.block.mixer.kv_spec

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]:
        """Embedded tokens [R, H] and step.hidden [R, H] -> (y for the LM head, recycled), both [R, H]. A recycled
        vector is read as a trunk hidden state is."""
        if spec.mask_first:
            embedded = ops.zero_where(embedded, step.positions, FIRST_PAIR_POSITION)
        e, h = self.embedding_norm(ops, embedded), self.hidden_norm(ops, step.hidden)
        x = self.projection(ops, ops.concat(h, e) if spec.hidden_first else ops.concat(e, h))
        delta, residual = self.block(ops, None, x, step.positions, pool)
        y, stream = self.norm.add(ops, delta, residual)
        return y, y if spec.recycle == "post_norm" else stream


class Module(Protocol):
    """One draft step's computation: MTPModule, or another kind of head's."""

    @property
    def kv_spec(self) -> AttentionSpec | None:
        """None: it keeps nothing between rounds."""

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]: ...


@dataclass(frozen=True)
class MTPHead:
    """Modules with their spec. `lm_head` None: the trunk's; `embedding` None: the trunk's."""

    spec: HeadSpec
    modules: Sequence[Module]
    kind: str = "mtp"
    lm_head: Linear | None = None
    embedding: Weight | None = None

    def programs(self, module: int, pool: Pool, embedding: Weight, lm_head: Linear) -> tuple[Program, Program]:
        """A draft step from stored trunk states, and one from recycled vectors; the same where they are read alike."""
        own = self.embedding if self.embedding is not None else embedding
        first = MTPProgram(self.spec, self.modules[module], pool, own, self.lm_head or lm_head)
        return first, replace(first, recycled=True) if self.kind == "eagle3" else first


@dataclass(frozen=True)
class MTPProgram:
    """One draft step for all rows. Results: `logits` [L, V'], `hidden` [R, H] (the recycled vector)."""

    spec: HeadSpec
    module: Module
    pool: Pool
    embedding: Weight
    lm_head: Linear
    recycled: bool = False

    def __call__(self, ops: Ops, step: StepInputs) -> dict[str, Buffer]:
        embedded = ops.embed(self.embedding, step.token_ids)
        y, recycled = self.module.forward(ops, self.spec, embedded, step, self.pool, recycled=self.recycled)
        return {"logits": self.lm_head(ops, ops.take_rows(y, step.logit_rows)), "hidden": recycled}
