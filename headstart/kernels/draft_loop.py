"""Drafting several tokens in one call, for backends that support it (Backend.prepare_draft_loop)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from headstart.core import Sampled, SamplingRows, StepPlan

MAX_LOGIT = 80.0  # bound of a confidence logit, beyond which e^x overflows (as in csrc/draft_loop.cpp)


def confidence_of(logit: float) -> float:
    """The score of a drafted token, from its confidence logit."""
    return 1 / (1 + math.exp(-max(logit, -MAX_LOGIT)))


def expected_saving(bins: Sequence[tuple[float, float]], worth: float, row_s: float) -> float:
    """Expected seconds that one more drafted token saves, if its score decides whether it is verified.

    bins: share of the tokens in each bin of scores, and their acceptance probability. worth: seconds that the token
    saves if accepted, times the probability that it is reached. row_s: seconds of its row.
    """
    return sum([share * (probability * worth - row_s) for share, probability in bins if probability * worth > row_s])


@dataclass(frozen=True, slots=True)
class GateRule:
    """When drafting of one sequence stops: drafters.base.Gate.should_continue as data.

    Of counts[p], `tries` are the drafted tokens at place p by bins of their scores, `hits` the accepted ones. A drafted
    token is accepted, given that the tokens before it are, with the probability min(1, factor * hits / tries) of its
    bin. Drafting continues while the probability c that all tokens so far are accepted satisfies c * token_s >= row_s,
    and the `expected_saving` of one more token exceeds draft_s, over the bins of the next place.
    """

    token_s: float  # seconds saved by an accepted token
    row_s: float  # seconds of one more verified row
    draft_s: float  # seconds of one further draft step
    factor: float  # correction of the acceptance rates
    counts: NDArray[np.float64]  # [places, 2, bins] tries and hits; the last place serves all further ones
    edges: NDArray[np.float64]  # bounds between bins of scores, ascending


class GateState:
    """A GateRule applied to one growing draft."""

    def __init__(self, rule: GateRule) -> None:
        self._rule, self._probability = rule, 1.0  # that all tokens so far are accepted

    def should_continue(self, depth: int, score: float) -> bool:
        """True if another token should follow. Called once per token, at depth 0, 1, ..."""
        rule = self._rule
        here, after = (rule.counts[min(place, len(rule.counts) - 1)] for place in (depth, depth + 1))
        tries, hits = here[:, np.searchsorted(rule.edges, score, side="right")].tolist()
        self._probability *= min(1.0, rule.factor * (hits / tries))
        if self._probability * rule.token_s < rule.row_s:
            return False
        tries, hits = after.tolist()
        total = sum(tries)
        bins = [(n / total, h / n) for n, h in zip(tries, hits, strict=True)]
        worth = self._probability * rule.factor * rule.token_s
        return expected_saving(bins, worth, rule.row_s) > rule.draft_s


class PendingSample(Protocol):
    """Tokens being sampled; later work can be launched without waiting for them."""

    @property
    def tokens(self) -> Any:
        """Device buffer [L, 1] that will hold the tokens."""

    def wait(self) -> Sampled:
        """Block the host until the tokens are there."""


@runtime_checkable
class AsyncSampler(Protocol):
    """A backend whose draft loops can start from tokens that are still being sampled (EarlyDraftLoop)."""

    def start_sample(self, logits: Any, rows: SamplingRows, *, vocab_size: int) -> PendingSample | None:
        """Start `Backend.sample`; None if that is not possible now."""


@dataclass(frozen=True)
class VerifyInputs:
    """Pending samples that decide how many drafted tokens of each of S sequences are accepted.

    Accepted is the longest prefix of `drafted` that equals the samples from `starts` on."""

    sample: PendingSample
    starts: Sequence[int]  # [S] index of each sequence's first sample
    drafted: Sequence[Sequence[int]]  # [S] drafted tokens
    known: Sequence[int]  # [S] rows before the row of the first sampled token
    accepted: Sequence[int | None]  # [S] a fixed number of accepted tokens (synthetic acceptance), or None


class PendingDrafts(Protocol):
    """Drafts being made."""

    def accepted(self) -> Sequence[int]:
        """Accepted tokens [S] of the drafts before."""

    def drafts(self, gates: Sequence[GateRule | None]) -> Sequence[tuple[list[int], list[float]]]:
        """Tokens and scores of the new drafts, as `DraftLoop.draft` returns them."""


DraftedTokens = tuple[list[int], list[float], Sequence[tuple[int, int, int, float]]]
"""Tokens, scores, and leaves as the fields of core.Leaf."""


class DraftLoop(Protocol):
    """Prepared draft programs with their pools and vocabulary."""

    def draft(
        self,
        first: Any,
        plan: StepPlan,
        rows: SamplingRows,
        depths: Sequence[int],
        gates: Sequence[GateRule | None],
        widths: Sequence[int],
        *,
        hidden_pool: Any = None,
    ) -> Sequence[DraftedTokens]:
        """Draft up to depths[s] tokens for each of S sequences; returns tokens, scores and leaves per sequence.

        Each token has up to widths[s] - 1 leaves: what is sampled from the same logits without the candidates before.
        A backend without `draws_leaves` returns none.

        `first` runs as in `Backend.run` with one row of logits per sequence, from which the first tokens are sampled;
        each step reads the token and the `hidden` result of the step before. A draft ends early when no token can be
        sampled or its gate stops it. Tokens equal those of `Backend.sample` bit for bit. Scores are probabilities in
        the raw softmax; a sequence without a gate has none. rows [S]: sampling state after each sequence's tokens;
        drafted tokens advance positions and penalties only.

        With is_block, `first` gives depths[s] rows of logits per sequence, whose first row in the plan is its last
        token. The result `confidence` [L, 1] of `first` plus that of the step program is the logit of a score; `carry`
        of the step program replaces the last columns of the next row of logits."""


@runtime_checkable
class EarlyDraftLoop(DraftLoop, Protocol):
    """A draft loop that starts before the host knows the tokens of the last pass."""

    def draft_early(
        self,
        first: Any,
        plan: StepPlan,
        rows: SamplingRows,
        depths: Sequence[int],
        verify_inputs: VerifyInputs,
        *,
        scored: bool,
        hidden_pool: Any = None,
    ) -> PendingDrafts:
        """`draft` for programs without is_block, started from pending samples.

        `plan` and `rows` describe the case that nothing is accepted, but `plan` has one more row per drafted token: row
        known + i belongs to sample i, or to drafted token i if accepted. Rows after the accepted ones store and see
        nothing. scored: gates will need scores."""
