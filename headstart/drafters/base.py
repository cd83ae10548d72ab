"""The one seam of drafters: attach to a target, propose, release. One file per drafter, named as the method is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from headstart.config import MAX_DEPTH
from headstart.core import Draft, Rows, Sampled, Sequence
from headstart.heads.base import Head
from headstart.kernels.chain import Drawn, GateRule
from headstart.kernels.ops import Backend, Buffer, Weight
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import Decoder, Tap
from headstart.layers.network import Network, Opened
from headstart.layers.sketch import SketchedLinear
from headstart.layers.weights import Weights


class Gate(Protocol):
    """Decides for one sequence how far its draft goes (engine.depth). `starts`: a draft that costs a pass of a head
    is worth beginning. `reach`: of a draft that costs one pass, so many tokens may be worth their rows."""

    starts: bool
    reach: int

    def goes_on(self, draft: Draft) -> bool:
        """Called once after each drafted token, with its score in place: shall there be another?"""

    def rule(self, method: str, depth: int) -> GateRule:
        """`goes_on` as data, for a draft by this method of up to so many tokens."""

    def suffices(self, draft: Draft) -> bool:
        """Is a draft that cost nothing good enough, or shall the head be asked?"""


@dataclass(frozen=True)
class Wish:
    """A sequence that wants a draft of up to `depth` tokens: exactly so many where there is no gate, as far as the
    drafter knows any; a drafter may ignore the gate."""

    sequence: Sequence
    depth: int
    gate: Gate | None = None

    @property
    def starts(self) -> bool:
        """Is a draft that costs a pass worth beginning?"""
        return self.gate is None or self.gate.starts


@dataclass(frozen=True)
class Hope:
    """A sequence that will want a draft of up to `depth` tokens once it is known what its pass has drawn, from draw
    number `draw` on, and how much of its draft that accepts (`accepted`, where it is known). scored: for a gate."""

    sequence: Sequence
    depth: int
    draw: int
    accepted: int | None
    scored: bool


@dataclass(frozen=True, eq=False)
class Steps:
    """How a network drafts token by token. `first`: the program over true rows, whose last one gives the first logits
    and the vector that the next step reads in place of hidden states; draft step i >= 1 runs `others[i - 1]`: a
    program, and how many rows lie between the true ones and its own. `rows_given`: `first` makes the logits of whole
    drafts, and `others` is nothing, or the program that each token and the row of logits behind it go through."""

    network: Opened
    first: str
    others: Seq[tuple[str, int]]
    token_ids: Weight | None
    rows_given: bool = False


class DraftRunner(Protocol):
    """The engine's services to a drafter."""

    def open(self, network: Network) -> Opened:
        """While attaching: have a network of one's own. Raises ModelError for what cannot run beside a trunk."""

    def run(self, opened: Opened, program: str, rows: Seq[Rows], *, hidden: Buffer = None) -> Mapping[str, Buffer]:
        """A pass of a program. Rows read `hidden` [R, width] where it is given, else stored states of the trunk."""

    def fill(self, opened: Opened, rows: Seq[Rows]) -> None:
        """These rows, made from true states, are now the network's KV of their positions."""

    def filled(self, opened: Opened, sequence: Sequence) -> int:
        """Positions below this one hold the network's KV, as far back as it reaches."""

    def draft(self, steps: Steps, wishes: Seq[Wish], parts: Seq[Rows], method: str) -> list[int]:
        """Whole drafts behind the rows of each wish, `parts`, for those that the backend can make with one call: their
        `draft` is set. Returns the indices of the others, which go step by step with `run` and `draw`: the tokens are
        the same."""

    def begin(self, steps: Steps, hopes: Seq[Hope], parts: Seq[Rows], drawn: Drawn) -> None:
        """Have drafts made, where the backend can, for sequences whose pass is still running: `parts` end with a row
        for each of its drafted tokens and one more, whose tokens are what is drawn. `draft` finds them later."""

    def draw(
        self,
        logits: Buffer,
        entries: Seq[tuple[Sequence, int, Seq[int]]],
        token_ids: Weight | None = None,
        *,
        scored: bool = False,
    ) -> Sampled:
        """One token per entry (sequence, absolute position, drafted tokens before it), by the trunk's own sampling
        pipeline, masks and noise; `probs` is kept when the engine's rule needs it. scored: with the raw log
        probability of each token. A row may fail (see Sampled): its draft ends there."""


@dataclass
class Round:
    """One sequence while its draft grows, token by token; `row`: where its logits are among those of a pass."""

    sequence: Sequence
    depth: int
    gate: Gate | None
    draft: Draft
    row: int = 0

    @classmethod
    def of(cls, wish: Wish, method: str, row: int = 0) -> Self:
        """Its draft is the sequence's from now on."""
        wish.sequence.draft = Draft(method=method)
        return cls(wish.sequence, wish.depth, wish.gate, wish.sequence.draft, row)

    @property
    def wants_more(self) -> bool:
        return len(self.draft.tokens) < self.depth

    @property
    def entry(self) -> tuple[Sequence, int, Seq[int]]:
        """What `DraftRunner.draw` is to draw next."""
        return self.sequence, len(self.sequence.tokens) + len(self.draft.tokens), self.draft.tokens

    def take(self, sampled: Sampled, row: int, score: float | None = None) -> None:
        """One more token, drawn in this row, with its distribution where those are kept, and with a score: this one, or
        the token's own probability where that is known. No token (nothing allowed is in the draft vocabulary, or the
        head fails) ends the draft; so may the gate behind one."""
        token, drawn = int(sampled.tokens[row]), self.draft
        if token < 0:
            self.depth = min(self.depth, len(drawn.tokens))
        if not self.wants_more:
            return
        drawn.tokens.append(token)
        if sampled.probs is not None:
            drawn.probs = [*(drawn.probs or []), sampled.probs[row]]
        if score is not None:
            drawn.scores.append(score)
        elif known := sampled.logprobs[row]:
            drawn.scores.append(math.exp(known.logprob))
        if self.wants_more and self.gate is not None and not self.gate.goes_on(drawn):
            self.depth = len(drawn.tokens)


@dataclass(frozen=True)
class DraftVocabulary:
    """For a head that has no draft vocabulary of its own: `token_ids`, ascending, are all that it drafts (None: the
    full vocabulary); `sketch` stands in for its LM head."""

    token_ids: NDArray[np.int64] | None = None
    sketch: SketchedLinear | None = None


@dataclass(frozen=True)
class Target:
    """What a drafter may borrow. The block table of a sequence serves the pools of its networks too, as far as blocks
    are reserved."""

    backend: Backend
    model: Decoder
    config: DecoderConfig
    weights: Weights
    runner: DraftRunner
    token_budget: int
    ngram: tuple[int, int]  # smallest and largest n of prompt lookup
    shared_lookup: bool = False  # may other requests' texts be looked up?
    head: Head | None = None
    vocabulary: DraftVocabulary = DraftVocabulary()


class Drafter:
    """Proposes tokens for sequences whose every token but the last is computed.

    A drafter declares `tap`, the trunk hidden state that is kept for it (None: none), `max_depth`, and `costs_per`:
    each drafted token costs a `step`, or all of them one `pass`.
    """

    method: str
    max_depth: int = MAX_DEPTH
    tap: Tap | None = None
    costs_per: Literal["step", "pass"] = "step"

    @property
    def auto_limit(self) -> int:
        """The deepest draft where depths are chosen step by step."""
        return self.max_depth

    @classmethod
    def attach(cls, target: Target) -> Self:
        """Borrow, and open networks. Raises UsageError or ModelError when this target cannot feed the drafter."""
        return cls()

    def missed(self, sequence: Sequence) -> int:
        """Positions that its networks must make up for before the next draft, beside the newest."""
        return 0

    def propose(self, wishes: Seq[Wish]) -> None:
        """Set `draft` of each sequence: at most the wished number of tokens. Slots for them are reserved."""
        raise NotImplementedError

    def begin(self, hopes: Seq[Hope], drawn: Drawn) -> None:
        """The pass of these sequences is running; drafts behind it may be begun (DraftRunner.begin). `propose` is asked
        all the same. Slots for what was drafted, one more token and the hoped for depth are reserved."""

    def release(self, sequence: Sequence) -> None:
        """The sequence is finished: forget it. A preempted one comes back with the same tokens and other blocks."""

    def forget(self) -> None:
        """Know nothing any more of sequences that are finished."""
