"""How deep to draft: per sequence and step, from measured costs (costs) and learned chances (odds).

A step should make its tokens as cheap as it can: it minimizes seconds / tokens, whose best value is what a token is
worth. As in Dinkelbach's method for ratios, each row and each draft step is then judged alone: it must give more, its
chance to be right times the worth of a token, than it costs. The worth is learned from the steps themselves: the time
of plain decoding, times the share of it that steps have really taken of late. Prompt rows in a pass make rows dearer
(a pass that computes anyway waits for no memory), but not tokens: they are paid for whatever is drafted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np

from headstart.config import MAX_DEPTH
from headstart.core import Draft, Sequence
from headstart.drafters.base import Wish
from headstart.engine.costs import Costs, Work
from headstart.engine.odds import EDGES, Odds, chances
from headstart.kernels.chain import GateRule

MARGIN = 0.02
"""What drafts promise must be this share of the step's time at least, of all sequences together: promises are never
exact, and the Python around a draft costs as much."""
BATCH_MARGIN, PRUDENCE = 0.06, 0.8
"""In large batches that share is so much more, in smaller ones less, and rows and draft steps must promise so much more
than they cost: a token saved in one sequence does not shorten a batch by its share, sequences that end at different
times share no prompt passes, and what is given up at the margin is worth little."""
PROBES = 0.005
"""Share of all time that may go into asking drafters that do not pay now."""
LONGEST_REST = 7
"""Where the head does not pay and lookups find nothing, so many steps go by until they are asked again."""
DRAFT_ROW = 0.1
"""Of a draft that is one pass: what each of its rows adds to it."""
LEAST_ROW = 0.002
"""Of a plain pass: a row is never taken to cost less, whatever noise says."""
SHORTEST, LONGEST = 0.98, 0.9
"""Decay of what steps took, and of how many drafted tokens they kept."""
BIN_EDGES = np.array(EDGES)


@dataclass(frozen=True)
class Room:
    """A sequence that can have a draft of up to `limit` tokens. `missed`: pairs that a head must make up for first."""

    sequence: Sequence
    limit: int
    missed: int


class AutoDepth:
    """Wishes for the next step, and what must be known to make them."""

    def __init__(self, method: str, block: int = 0) -> None:
        """method: the drafter's. block: the most tokens of a draft, where all of them cost one pass; 0: each costs a
        step."""
        self.block = block
        self.costs, self.odds = Costs.unknown(), Odds()
        self.token_s = self.row_s = self.draft_s = 0.0
        self.method = method
        self._spent = self._plain = 0.0  # seconds that steps took, and would have taken for the same tokens
        self._kept, self._credit, self._length = 2.0, 0.0, 128.0
        self._work, self._margin, self._prudence, self._least = Work(0), 0.0, 1.0, 0.0
        self._asks, self._rest, self._wait = False, 0, 0  # is the head asked; steps to rest for; of these, those left

    @property
    def share(self) -> float:
        """Time of a token, as a share of its time in plain decoding."""
        return min(1.0, self._spent / self._plain) if self._plain else 1.0

    def wishes(self, rooms: Seq[Room]) -> list[Wish]:
        """A gated wish for each room, in the pass that has been weighed."""
        options = [self._options(room.sequence, room.limit) for room in rooms]
        gains = [self._gain(room, sum(each)) for room, each in zip(rooms, options, strict=True)]
        asked = [gain for gain in gains if gain > 0]
        # a step of few sequences costs more than their part of one of all
        alone = self._prudence * self.costs.drafts.at(max(len(asked), 1)) - self.draft_s * len(asked)
        self._asks = enough = sum(asked) - alone >= self._margin
        gates = [
            Gate(self, room.sequence, enough and gain > 0, self._reach(each))
            for room, gain, each in zip(rooms, gains, options, strict=True)
        ]
        if not all(gate.starts for gate in gates):
            refused = [(room, gate) for room, gate in zip(rooms, gates, strict=True) if not gate.starts]
            self._probe(*min(refused, key=lambda each: each[0].missed))
        return [Wish(room.sequence, room.limit, gate) for room, gate in zip(rooms, gates, strict=True)]

    def skips_step(self) -> bool:
        """Is nobody to be asked for drafts in this step? Called once in each."""
        self._wait -= 1
        return self._wait >= 0

    def weigh(self, work: Work) -> bool:
        """What a token is worth, and what a row and a draft step cost, around the work ahead: the next pass without any
        draft. False when no draft can pay, be it as sure as it may."""
        costs, count = self.costs, work.rows
        plain = costs.of_pass(Work(count, 0, work.reach))
        more = max(1, round(count * self._kept))
        ahead_s = costs.of_pass(work)
        row_s = (costs.of_pass(_deeper(work, more)) - ahead_s) / more
        crowd = (1 - 1 / count) ** 2
        self._prudence, self._margin = 1 + PRUDENCE * crowd, (MARGIN + BATCH_MARGIN * crowd) * plain
        self.row_s = self._prudence * max(row_s, LEAST_ROW * plain)
        self.token_s = self.share * plain / count
        next_s = costs.of_pass(replace(work, rows=count + 1)) - ahead_s
        self._least = min(self.row_s, self._prudence * next_s) / self.token_s
        self.draft_s = self._prudence * costs.drafts.at(count) / count
        self._work = work
        if self.row_s < self.token_s:
            return True
        self._wait = LONGEST_REST
        return False

    def _gain(self, room: Room, promise: float) -> float:
        """Seconds that a draft of the head promises to save in a step; 0 where it does not pay, or not what must be
        made up for first within the rest of the text."""
        sequence, gain = room.sequence, promise - self.draft_s
        if gain <= 0 or not room.missed:
            return max(gain, 0.0)
        left = min(self._length, sequence.request.params.max_tokens - sequence.num_output)
        return gain if gain * left > self.costs.catch_up * room.missed else 0.0

    def _options(self, sequence: Sequence, limit: int) -> list[float]:
        """What a draft of the head saves, token by token, each with its chance to be reached: only the first, where the
        others cost steps of their own."""
        factor, reached, options = self.odds.factor(sequence, self.method), 1.0, list[float]()
        for place in range(min(limit, self.block or 1)):
            if place and reached * factor * self.token_s < self.row_s:
                break
            bins = self.odds.table(sequence, self.method, place).bins()
            options.append(self._option(bins, reached * factor))
            reached *= min(1.0, factor * sum([share * chance for share, chance in bins]))
        return options

    def _reach(self, options: Seq[float]) -> int:
        """How many tokens of a draft promise more than their rows cost in its pass, and one more, to learn of."""
        least = DRAFT_ROW * self.draft_s
        return 1 + next((place for place, option in enumerate(options) if option < least), len(options))

    def _option(self, bins: Seq[tuple[float, float]], factor: float) -> float:
        """What one more drafted token promises: its score decides whether it is verified."""
        worth, cost = factor * self.token_s, self.row_s
        return sum([share * (chance * worth - cost) for share, chance in bins if chance * worth > cost])

    def _probe(self, room: Room, gate: Gate) -> None:
        """Ask for a draft that promises too little, when there is time to learn."""
        if self.costs.of_draft([1], room.missed) < self._credit:
            self._credit, gate.starts = 0.0, True

    def goes_on(self, sequence: Sequence, draft: Draft, chance: float) -> bool:
        """Is one more token worth drafting, after some that are all right with this chance?"""
        if chance * self.token_s < self.row_s:
            return False
        table = self.odds.table(sequence, draft.method, len(draft.tokens))
        factor = self.odds.factor(sequence, draft.method)
        return self._option(table.bins(), chance * factor) > self.next_s

    @property
    def next_s(self) -> float:
        """Seconds that one more token of a draft costs before it is verified."""
        return 0.0 if self.block else self.draft_s

    def suffices(self, sequence: Sequence, draft: Draft, *, asks: bool) -> bool:
        """Is a draft that cost nothing better than what the head promises, or than nothing where it is not asked?"""
        if not draft.tokens:
            return False
        self.odds.drafted(sequence, draft)
        worth_it = chances(self.odds, sequence, draft, self.row_s / self.token_s)
        free = sum(worth_it) * self.token_s - len(worth_it) * self.row_s
        if not asks:
            return free > 0
        promise = sum(self._options(sequence, MAX_DEPTH))
        if not self.block:  # those behind the first may promise as much
            promise /= max(1 - self.odds.table(sequence, self.method, 0).mean, 0.1)
        return free > promise - self.draft_s

    def cut(self, wishes: Seq[Wish]) -> None:
        """Leave of the drafts the rows that are worth verifying together, the likeliest first; none when they promise
        too little."""
        drafts = [wish.sequence for wish in wishes if wish.sequence.draft.tokens]
        rows: list[tuple[float, int]] = []  # chance to be right, draft
        for index, sequence in enumerate(drafts):
            self.odds.drafted(sequence, sequence.draft)
            rows += [(chance, index) for chance in chances(self.odds, sequence, sequence.draft, self._least)]
        rows.sort(key=lambda row: -row[0])  # stable: none before those that it hangs on
        lengths = Counter([index for _, index in rows[: self._worth_it([chance for chance, _ in rows])]])
        for index, sequence in enumerate(drafts):
            sequence.draft = sequence.draft.cut(lengths[index])
        kept = lengths.total()
        self._rest = 0 if kept or self._asks else min(self._rest + 1, LONGEST_REST)
        self._wait = self._rest
        if drafts:
            self._kept += (1 - LONGEST) * (kept / len(drafts) - self._kept)

    def _worth_it(self, falling: Seq[float]) -> int:
        """How many rows of these chances save most; 0 where that is too little."""
        work, costs, most, count, saved = self._work, self.costs, self._margin, 0, 0.0
        plain = costs.of_pass(work)
        for rows, chance in enumerate(falling, 1):
            saved += chance * self.token_s
            if (net := saved - self._prudence * (costs.of_pass(_deeper(work, rows)) - plain)) > most:
                most, count = net, rows
        return count

    def stepped(self, work: Work, count: int, emitted: int, pass_s: float, draft_s: float) -> None:
        """A step of `count` sequences has emitted so many tokens (0: others have chosen some of the depths); seconds of
        its pass, and of the drafts after it."""
        self._credit += PROBES * (pass_s + draft_s)
        if not work.prompt_rows and emitted:
            plain = self.costs.of_pass(Work(count, 0, work.reach * count // work.rows)) / count
            self._spent = SHORTEST * self._spent + pass_s + draft_s
            self._plain = SHORTEST * self._plain + plain * emitted
        self.costs.passed(work, pass_s)

    def release(self, sequence: Sequence) -> None:
        self._length += 0.1 * (sequence.num_output - self._length)
        self.odds.release(sequence)


def _deeper(work: Work, rows: int) -> Work:
    """With so many drafted rows, as far along as the others."""
    return Work(work.rows + rows, work.prompt_rows, work.reach + work.reach * rows // work.rows)


@dataclass
class Gate:
    """One sequence's draft while it grows. `starts`: a head is worth asking at all; `reach`: for so many tokens."""

    auto: AutoDepth
    sequence: Sequence
    starts: bool
    reach: int = MAX_DEPTH
    chance: float = 1.0

    def rule(self, method: str, depth: int) -> GateRule:
        """`goes_on` as data, for a draft of this method."""
        auto, sequence = self.auto, self.sequence
        tables, factor = auto.odds.places(sequence, method, depth), auto.odds.factor(sequence, method)
        return GateRule(auto.token_s, auto.row_s, auto.next_s, factor, tables, BIN_EDGES)

    def goes_on(self, draft: Draft) -> bool:
        """Called after each token: shall there be another?"""
        self.chance *= self.auto.odds.chance(self.sequence, draft, len(draft.tokens) - 1)
        return self.auto.goes_on(self.sequence, draft, self.chance)

    def suffices(self, draft: Draft) -> bool:
        return self.auto.suffices(self.sequence, draft, asks=self.starts)
