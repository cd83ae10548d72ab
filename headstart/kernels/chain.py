"""Whole drafts with one call, for backends that can make them (Backend.prepare_chain)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headstart.core import Sampled, SamplingRows, StepPlan


class BinCounts(Protocol):
    """Of drafted tokens by bins of their scores: how often each bin came, and how often the token was right."""

    @property
    def tries(self) -> Any: ...
    @property
    def hits(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class GateRule:
    """How far the draft of one sequence goes: drafters.base.Gate.goes_on as data.

    A token with a score between `edges` b - 1 and b is right, if those before it are, with the chance min(1, factor *
    hits[b] / tries[b]) of the table of its place, the last one for all beyond. A draft that is right with chance c goes
    on where c * token_s >= row_s, and where one more token promises more than draft_s: the sum over the bins of its
    place, by their share of tries, of (c * factor * hits / tries * token_s - row_s), where that is positive.
    """

    token_s: float
    row_s: float
    draft_s: float
    factor: float
    tables: Sequence[BinCounts]  # buffers of float64
    edges: NDArray[np.float64]


class Drawn(Protocol):
    """Tokens that are being drawn (DrawsEarly); the host may wait for them, the next work need not. `tokens`
    [L, 1]: where they will lie."""

    @property
    def tokens(self) -> Any: ...

    def wait(self) -> Sampled: ...


@runtime_checkable
class DrawsEarly(Protocol):
    """A backend whose chains can work on with what will be drawn (EarlyChain)."""

    def begin_sample(self, logits: Any, rows: SamplingRows, *, vocab_size: int) -> Drawn | None:
        """`Backend.sample`, begun; None: not now."""


@dataclass(frozen=True)
class Judged:
    """Draws that decide how much of the drafts of S sequences stands: the longest prefix of `drafted` [S] that equals
    the draws from `starts` [S] on, or as many as `accepted` [S] says. `known` [S]: rows before the one whose token is
    the first draw."""

    drawn: Drawn
    starts: Sequence[int]
    drafted: Sequence[Sequence[int]]
    known: Sequence[int]
    accepted: Sequence[int | None]


class Begun(Protocol):
    """Drafts that are being made."""

    def accepted(self) -> Sequence[int]:
        """Of the tokens judged, [S]."""

    def drafts(self, gates: Sequence[GateRule | None]) -> Sequence[tuple[list[int], list[float]]]:
        """As `Chain.draft` gives them."""


class Chain(Protocol):
    """Programs, their pools and a vocabulary, as prepared. `first` and `hidden_pool` are a backend's own."""

    def draft(
        self,
        first: Any,
        plan: StepPlan,
        rows: SamplingRows,
        depths: Sequence[int],
        gates: Sequence[GateRule | None],
        *,
        hidden_pool: Any = None,
    ) -> Sequence[tuple[list[int], list[float]]]:
        """Tokens and scores of S sequences. `first` runs as in `Backend.run`, with one row of logits for each; these
        draw the first tokens, its `hidden` is what the next step reads, and so on up to depths [S], as long as there is
        a token and the gate [S] lets it. `rows` [S]: the state after a sequence's tokens; those drafted since count in
        positions and penalties, and change nothing else. Tokens are what `sample` draws, bit for bit; scores their
        probabilities in the raw softmax, none without a gate.

        Of a chain with `rows_given`, `first` makes depths[s] rows of logits for each sequence, whose first row in the
        plan is its last token. A `confidence` [L, 1] of `first`, and the program's for a token, sum to the logit of
        a score."""


@runtime_checkable
class EarlyChain(Chain, Protocol):
    """A chain that drafts behind a pass while the host does not know yet what that has drawn."""

    def begin(
        self,
        first: Any,
        plan: StepPlan,
        rows: SamplingRows,
        depths: Sequence[int],
        judged: Judged,
        *,
        scored: bool,
        hidden_pool: Any = None,
    ) -> Begun:
        """As `draft`, of programs without `rows_given`. `plan` and `rows` are those for drafts of which nothing was
        accepted, but `plan` has as many rows more as there are drafted tokens: row known + i is that of draw i, or of
        drafted token i where that stands; what does not stand stores and sees nothing."""
