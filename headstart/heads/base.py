"""Heads beside a trunk: a hidden state of it and the next token in, a guess of the token after that one out.

Families and kinds of heads (heads/) differ in what they declare here; the module of a draft step is the kind's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from headstart.config import MAX_DEPTH
from headstart.kernels.ops import AttentionSpec, Buffer, Ops, Pool, StateSpec, StepInputs, Weight
from headstart.layers.decoder import LayerConfig, Tap, tap_width
from headstart.layers.linear import Linear
from headstart.layers.network import NetworkProgram, Pools

FIRST_PAIR_POSITION = 1
"""The pair (h_p, t_{p+1}) lives at position p + 1, so pair 0 is at 1."""


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """What a head declares about itself: of its file, its modules, its drafter and its trainer alike.

    `layer`: the block of each module; None: as the family's or the kind's own. `hidden_first`: concat order [h ; e]
    instead of [e ; h]. `mask_first`: the embedding of pair 0 is zeroed. `tap`: the trunk's hidden state that is read;
    `recycle`: the vector that the next step reads in its place. `beyond`: which module serves draft steps past the last
    one; None refuses such depths unless there is one module. `norm_before_residual`: EAGLE-3 adds to the normed state.
    """

    kind: str = "mtp"
    layer: LayerConfig | None = None
    num_modules: int = 1
    hidden_first: bool = False
    mask_first: bool = False
    tap: Tap = "post_norm"
    recycle: Literal["post_norm", "pre_norm"] = "post_norm"
    beyond: Literal["last", "cycle"] | None = None
    norm_before_residual: bool = False

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

    @property
    def depth_limit(self) -> int:
        """The deepest draft it declares a module for."""
        return next((step for step in range(MAX_DEPTH) if self.module_of(step) is None), MAX_DEPTH)


class Module(Protocol):
    """One draft step's computation; each kind of head has its own."""

    @property
    def kv_spec(self) -> AttentionSpec | None:
        """None: it keeps nothing between rounds."""

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]:
        """Embedded tokens [R, H] and step.hidden (stored [R, tap width], or recycled [R, H]) -> (y for the LM head,
        what the next step reads), both [R, H]."""


@dataclass(frozen=True)
class Head:
    """A head that fits its trunk: modules, where they came from, its draft vocabulary (ascending target ids; None: the
    full one). `lm_head` and `embedding` None: the trunk's."""

    spec: HeadSpec
    modules: Sequence[Module]
    source: str
    draft_token_ids: NDArray[np.int64] | None = None
    lm_head: Linear | None = None
    embedding: Weight | None = None


@dataclass(frozen=True)
class HeadNetwork:
    """A head beside its trunk: the pair (h_p, t_{p+1}) lives at position p + 1 and reads the state of position p."""

    head: Head
    hidden_size: int
    embedding: Weight
    lm_head: Linear
    first_position: int = FIRST_PAIR_POSITION
    behind: int = FIRST_PAIR_POSITION
    state_specs: tuple[StateSpec, ...] = ()

    @property
    def kv_specs(self) -> Sequence[AttentionSpec]:
        return [module.kv_spec for module in self.head.modules if module.kv_spec]

    def programs(self, pools: Pools) -> Mapping[str, NetworkProgram]:
        """Of module i: `pairs.i`, a draft step from stored trunk states, and `next.i`, one from recycled vectors."""
        kv, programs = iter(pools.kv), {}
        for index, module in enumerate(self.head.modules):
            pool = next(kv) if module.kv_spec else None
            code = DraftStep(self.head.spec, module, pool, self.embedding, self.lm_head)
            programs[f"pairs.{index}"] = NetworkProgram(code, tap_width(self.head.spec.tap, self.hidden_size))
            programs[f"next.{index}"] = NetworkProgram(replace(code, recycled=True), self.hidden_size)
        return programs


@dataclass(frozen=True)
class DraftStep:
    """All rows of a draft step. Results: `logits` [L, V'], `hidden` [R, H] (the recycled vector)."""

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
