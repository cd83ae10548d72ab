"""How deep to draft: per sequence and step, from measured costs (costs) and learned chances (odds).

A step should make its tokens as cheap as it can: it minimizes seconds / tokens, whose best value is what a token is
worth. As in Dinkelbach's method for ratios, each row and each draft step is then judged alone: it must give more, its
chance to be right times the worth of a token, than it costs. The worth is learned from the steps themselves: the time
of plain decoding, times the share of it that steps have really taken of late. Prompt rows in a pass make rows dearer
(a pass that computes anyway waits for no memory), but not tokens: they are paid for whatever is drafted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from headstart.core import Draft, Sequence
from headstart.drafters._drafter import Wish
from headstart.engine.costs import Costs, Work
from headstart.engine.odds import Odds, chances

MARGIN = 0.01
"""Drafting begins when it promises this share of a token's worth at least; what it promises is never exact."""
PRUDENCE = 0.3
"""In large batches rows and draft steps must promise so much more than they cost, in smaller ones less: a token saved
in one sequence does not shorten a batch by its share, and what is given up at the margin is worth little."""
PROBES = 0.005
"""Share of all time that may go into asking drafters that do not pay now."""
LEAST_ROW = 0.002
"""Of a plain pass: a row is never taken to cost less, whatever noise says."""
SHORTEST, LONGEST = 0.98, 0.9
"""Decay of what steps took, and of how many drafted tokens they kept."""


@dataclass(frozen=True)
class Room:
    """A sequence that can have a draft of up to `limit` tokens. `missed`: pairs that a head must make up for first."""

    sequence: Sequence
    limit: int
    missed: int


class AutoDepth:
    """Wishes for the next step, and what must be known to make them."""

    def __init__(self, method: str) -> None:
        """method: the drafter's."""
        self.costs, self.odds = Costs.unknown(), Odds()
        self.token_s = self.row_s = self.draft_s = 0.0
        self.method = method
        self._spent = self._plain = 0.0  # seconds that steps took, and would have taken for the same tokens
        self._kept, self._credit, self._length = 2.0, 0.0, 128.0
        self._work, self._prudence = Work(0), 1.0

    @property
    def share(self) -> float:
        """Time of a token, as a share of its time in plain decoding."""
        return min(1.0, self._spent / self._plain) if self._plain else 1.0

    def wishes(self, rooms: Seq[Room], work: Work) -> list[Wish]:
        """A gated wish for each room. work: of the next pass without any draft."""
        self._weigh(work)
        gates = [Gate(self, room.sequence, self._pays(room)) for room in rooms]
        refused = [(room, gate) for room, gate in zip(rooms, gates, strict=True) if not gate.starts]
        if refused:
            self._probe(*min(refused, key=lambda each: each[0].missed))
        return [Wish(room.sequence, room.limit, gate) for room, gate in zip(rooms, gates, strict=True)]

    def _weigh(self, work: Work) -> None:
        """What a token is worth, and what a row and a draft step cost, around the work ahead."""
        costs, count = self.costs, work.rows
        plain = costs.of_pass(Work(count, 0, work.reach))
        more = max(1, round(count * self._kept))
        deeper = Work(count + more, work.prompt_rows, work.reach + work.reach * more // count)
        row_s = (costs.of_pass(deeper) - costs.of_pass(work)) / more
        self._prudence = 1 + PRUDENCE * (1 - 1 / count)
        self.row_s = self._prudence * max(row_s, LEAST_ROW * plain)
        self.token_s = self.share * plain / count
        self.draft_s = self._prudence * costs.drafts.at(count) / count
        self._work = work

    def _pays(self, room: Room) -> bool:
        """Is a draft's first token worth its making, and what must be made up for worth the rest of the text?"""
        sequence = room.sequence
        table = self.odds.table(sequence, self.method, 0)
        gain = self._option(table.bins(), self.odds.factor(sequence, self.method)) - self.draft_s
        if gain < MARGIN * self.token_s:
            return False
        left = min(self._length, sequence.request.params.max_tokens - sequence.num_output)
        return not room.missed or gain * left > self.costs.catch_up * room.missed

    def _option(self, bins: Seq[tuple[float, float]], factor: float) -> float:
        """What one more drafted token promises: its score decides whether it is verified."""
        worth, cost = factor * self.token_s, self.row_s
        return sum([share * (chance * worth - cost) for share, chance in bins if chance * worth > cost])

    def _probe(self, room: Room, gate: Gate) -> None:
        """Ask for a draft that promises too little, when there is time to learn."""
        cost = self.costs.of_draft([1], room.missed)
        if cost < self._credit:
            self._credit, gate.starts = 0.0, True

    def goes_on(self, sequence: Sequence, draft: Draft, chance: float) -> bool:
        """Is one more token worth drafting, after some that are all right with this chance?"""
        if chance * self.token_s < self.row_s:
            return False
        table = self.odds.table(sequence, draft.method, len(draft.tokens))
        factor = self.odds.factor(sequence, draft.method)
        return self._option(table.bins(), chance * factor) > self.draft_s

    def takes(self, sequence: Sequence, draft: Draft) -> bool:
        """Is a draft that cost nothing better than what the head promises?"""
        if not draft.tokens:
            return False
        self.odds.drafted(sequence, draft)
        free = sum(max(0.0, chance * self.token_s - self.row_s) for chance in chances(self.odds, sequence, draft))
        table = self.odds.table(sequence, self.method, 0)
        bound = self._option(table.bins(), self.odds.factor(sequence, self.method)) / max(1 - table.mean, 0.1)
        return free > bound - self.draft_s

    def cut(self, wishes: Seq[Wish]) -> None:
        """Leave of each draft what is worth verifying; nothing when all of it together is not."""
        promised, kept = 0.0, 0
        drafts = []
        for wish in wishes:
            sequence, draft = wish.sequence, wish.sequence.draft
            if not draft.tokens:
                continue
            self.odds.drafted(sequence, draft)
            found = chances(self.odds, sequence, draft)
            length = sum(chance * self.token_s > self.row_s for chance in found)
            drafts.append((sequence, length))
            promised += sum(found[:length])
            kept += length
        work = self._work
        deeper = Work(work.rows + kept, work.prompt_rows, work.reach + work.reach * kept // work.rows)
        if promised * self.token_s < self._prudence * (self.costs.of_pass(deeper) - self.costs.of_pass(work)):
            kept = 0
        for sequence, length in drafts:
            sequence.draft = sequence.draft.cut(length if kept else 0)
        if kept:
            self._kept += (1 - LONGEST) * (kept / len(drafts) - self._kept)

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


@dataclass
class Gate:
    """One sequence's draft while it grows. `starts`: a head is worth asking at all."""

    pilot: AutoDepth
    sequence: Sequence
    starts: bool
    chance: float = 1.0

    def goes_on(self, draft: Draft) -> bool:
        """Called after each token: shall there be another?"""
        self.chance *= self.pilot.odds.chance(self.sequence, draft, len(draft.tokens) - 1)
        return self.pilot.goes_on(self.sequence, draft, self.chance)

    def takes(self, draft: Draft) -> bool:
        return self.pilot.takes(self.sequence, draft)
