"""How likely drafted tokens are right, learned from what came of them.

A drafter scores each of its tokens in 0..1 (a head: the token's own probability); scores are calibrated by counting.
What a draft said is held against the tokens that came, verified or not: at depth 0 a guess still teaches something.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from headstart.core import GREEDY_BELOW, Draft, Sequence

EDGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))
NO_SCORE = 0.5
"""Score of a token whose drafter gives none."""
PRIOR = 2.0
"""Observations that a bin starts with: its score is right, and all bins are as frequent."""
MEMORY = 2000.0
"""Observations of a table after which older ones count half."""
OWN_PRIOR = 6.0
"""Expected hits of a sequence that it takes until its own record weighs as much as everybody's."""
OWN_MEMORY = 24.0
WARM = 0.85
"""Temperatures from here on are one class, those below it down to greedy another; texts that are not ordinary have one
of their own, so that nobody can spoil what is known of the others."""
STRANGE = 3


@dataclass
class Table:
    """Bins of scores: how often each came, and how often the token was right then."""

    tries: array[float] = field(default_factory=lambda: array("d", [PRIOR] * len(MIDDLES)))
    hits: array[float] = field(default_factory=lambda: array("d", [PRIOR * middle for middle in MIDDLES]))
    seen: float = 0.0  # without the prior
    right: float = 0.0
    _bins: list[tuple[float, float]] = field(default_factory=list)

    def learn(self, score: float, hit: bool) -> None:
        place = bisect_right(EDGES, score)
        self.tries[place] += 1
        self.hits[place] += hit
        self.seen += 1
        self.right += hit
        self._bins = []
        if self.seen > MEMORY:
            self.tries, self.hits = (array("d", [n / 2 for n in counts]) for counts in (self.tries, self.hits))
            self.seen, self.right = self.seen / 2, self.right / 2

    def chance(self, score: float) -> float:
        place = bisect_right(EDGES, score)
        return self.hits[place] / self.tries[place]

    @property
    def mean(self) -> float:
        return sum(self.hits) / sum(self.tries)

    def bins(self) -> list[tuple[float, float]]:
        """(share of all tokens, chance to be right) of each bin."""
        if not self._bins:
            whole = sum(self.tries)
            self._bins = [(tries / whole, hits / tries) for tries, hits in zip(self.tries, self.hits, strict=True)]
        return self._bins


PLACES = 6
"""Tokens of a draft from this place on are judged by the one at it: the longer a draft has been right, the likelier it
goes on."""
Key = tuple[str, int, int]
"""Drafter, class of temperature, place in the draft."""


@dataclass
class _Open:
    """A draft to be held against the text: its token at `place` is the text's next, all before it were right."""

    draft: Draft
    start: int
    place: int = 0


@dataclass
class _Own:
    """A sequence's record with one drafter: hits, and those that the tables expected."""

    hits: float = OWN_PRIOR
    expected: float = OWN_PRIOR

    @property
    def factor(self) -> float:
        return self.hits / self.expected

    def learn(self, expected: float, hit: bool) -> None:
        self.hits += hit
        self.expected += expected
        if self.expected > OWN_MEMORY:
            self.hits, self.expected = self.hits / 2, self.expected / 2


class Odds:
    """Chances of drafted tokens, given that all tokens before them are right."""

    def __init__(self) -> None:
        self.tables: dict[Key, Table] = {}
        self._own: dict[Sequence, dict[str, _Own]] = {}
        self._open: dict[Sequence, dict[str, _Open]] = {}  # by drafter

    def table(self, sequence: Sequence, method: str, place: int) -> Table:
        """Of a drafter's token at a place of its draft, counted from 0."""
        key = (method, _warmth(sequence), min(place, PLACES))
        table = self.tables.get(key)
        if table is None:
            table = self.tables[key] = Table()
        return table

    def places(self, sequence: Sequence, method: str, depth: int) -> list[Table]:
        """Of the places of a draft so deep; the last of them also serves those beyond PLACES."""
        return [self.table(sequence, method, place) for place in range(min(depth, PLACES + 1))]

    def factor(self, sequence: Sequence, method: str) -> float:
        """How much more often than expected this drafter is right in this sequence."""
        records = self._own.get(sequence)
        own = records.get(method) if records else None
        return own.factor if own else 1.0

    def chance(self, sequence: Sequence, draft: Draft, place: int) -> float:
        """That the token at `place` is right, if those before it are."""
        table = self.table(sequence, draft.method, place)
        return min(1.0, self.factor(sequence, draft.method) * table.chance(_score(draft, place)))

    def drafted(self, sequence: Sequence, draft: Draft) -> None:
        """Remember a draft, as it was before anything was cut from it, unless the drafter's last one still holds."""
        self._open.setdefault(sequence, {}).setdefault(draft.method, _Open(draft, len(sequence.tokens)))

    def compare(self, sequence: Sequence) -> None:
        """Tokens have been committed: hold open drafts against them, each up to its first miss. What was cut from a
        draft is compared too, when the text gets there."""
        opened = self._open.get(sequence)
        if not opened:
            return
        tokens, records = sequence.tokens, self._own.setdefault(sequence, {})
        for method, each in list(opened.items()):
            own = records.get(method)
            if own is None:
                own = records[method] = _Own()
            guesses = each.draft.tokens
            hit = True
            while hit and each.place < len(guesses) and each.start + each.place < len(tokens):
                place = each.place
                table, score = self.table(sequence, method, place), _score(each.draft, place)
                hit = guesses[place] == tokens[each.start + place]
                if place <= PLACES:  # one long copy must not outvote all others
                    own.learn(table.chance(score), hit)
                    table.learn(score, hit)
                each.place += 1
            if not hit or each.place == len(guesses):
                del opened[method]

    def release(self, sequence: Sequence) -> None:
        self._open.pop(sequence, None)
        self._own.pop(sequence, None)

    def seen(self, method: str) -> tuple[float, float]:
        """(tries, share that was right) of a drafter's first tokens in ordinary texts, of late."""
        firsts = [(key, table) for key, table in self.tables.items() if key[0] == method and key[2] == 0]
        tables = [table for (_, warmth, _), table in firsts if warmth != STRANGE]
        tries = sum(table.seen for table in tables)
        return tries, sum(table.right for table in tables) / max(tries, 1.0)


def chances(odds: Odds, sequence: Sequence, draft: Draft, least: float) -> Seq[float]:
    """That the first 1, 2, ... tokens of a draft are all right, as far as it is likelier than `least`."""
    kept, product = [], 1.0
    for place in range(len(draft.tokens)):
        product *= odds.chance(sequence, draft, place)
        if product <= least:
            break
        kept.append(product)
    return kept


def _score(draft: Draft, place: int) -> float:
    return draft.scores[place] if place < len(draft.scores) else NO_SCORE


def _warmth(sequence: Sequence) -> int:
    if not sequence.is_ordinary:
        return STRANGE
    temperature = sequence.row_constants.temperature
    return 0 if temperature < GREEDY_BELOW else 1 if temperature < WARM else 2
