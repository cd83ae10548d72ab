"""Estimates the probability that drafted tokens are accepted, from the outcomes of earlier drafts.

A drafter scores each token in 0..1 (a head: the token's own probability). Scores are calibrated by counting outcomes
per bin of scores. Drafts are compared with the committed tokens even where they were cut before verification, so the
estimates stay current while every draft is cut to nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headstart.core import GREEDY_BELOW, Draft, Leaf, Sequence

EDGES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # upper edges of all bins of scores but the last
MIDDLES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0), strict=True))  # of the bins
NO_SCORE = 0.5  # score of a token whose drafter gives none
PRIOR = 2.0  # pseudo-count of tokens in each bin, accepted at the rate of the bin's middle score
MEMORY = 2000.0  # number of tokens after which all counts of a table are halved
OWN_PRIOR = 24.0  # pseudo-count of accepted tokens that the record of each sequence starts with
OWN_MEMORY = 96.0  # expected number of accepted tokens after which a sequence's counts are halved
WARM = 0.85  # temperature classes: 0 greedy, 1 below WARM, 2 from WARM on, 3 UNUSUAL
UNUSUAL = 3
"""Class of sequences with unusual sampling (not Sequence.is_ordinary), kept apart from all others."""


@dataclass
class CalibrationTable:
    """Outcomes of one drafter at one draft position, by bins of scores."""

    tries: memoryview[float]  # [bins] drafted tokens, PRIOR included
    hits: memoryview[float]  # [bins] accepted tokens, PRIOR included
    num_tries: float = 0.0  # without the prior
    num_hits: float = 0.0  # without the prior
    _bins: list[tuple[float, float]] = field(default_factory=list)  # cache of `bins`

    def learn(self, score: float, hit: bool) -> None:
        index = bisect_right(EDGES, score)
        self.tries[index] += 1
        self.hits[index] += hit
        self.num_tries += 1
        self.num_hits += hit
        self._bins = []
        if self.num_tries > MEMORY:
            for index in range(len(MIDDLES)):
                self.tries[index] /= 2
                self.hits[index] /= 2
            self.num_tries, self.num_hits = self.num_tries / 2, self.num_hits / 2

    def probability(self, score: float) -> float:
        """Acceptance probability of a token with this score."""
        index = bisect_right(EDGES, score)
        return self.hits[index] / self.tries[index]

    @property
    def mean(self) -> float:
        """Acceptance probability over all scores."""
        return sum(self.hits) / sum(self.tries)

    def bins(self) -> list[tuple[float, float]]:
        """(share of all tokens, acceptance probability) of each bin."""
        if not self._bins:
            whole = sum(self.tries)
            self._bins = [(tries / whole, hits / tries) for tries, hits in zip(self.tries, self.hits, strict=True)]
        return self._bins


PLACES = 6
"""Each draft position below PLACES has its own table: a draft that has been right for longer is likelier to stay right.
Later positions share one table."""
Key = tuple[str, int]  # drafter, temperature class


@dataclass
class _PendingDraft:
    """A draft to be compared with committed tokens."""

    draft: Draft
    start: int  # position of its first token in the sequence
    place: int = 0  # tokens compared so far; all were right


class _Calibration:
    """Outcomes of one drafter in all sequences of a temperature class."""

    def __init__(self) -> None:
        # [PLACES + 1, 2, bins] tries and hits of each table
        self.counts = np.array([[[PRIOR] * len(MIDDLES), [PRIOR * middle for middle in MIDDLES]]] * (PLACES + 1))
        self.tables = [CalibrationTable(tries.data, hits.data) for tries, hits in self.counts]  # by draft position


@dataclass
class _SequenceRecord:
    """Outcomes of one drafter in one sequence."""

    calibration: _Calibration
    hits: float = OWN_PRIOR  # accepted tokens
    expected: float = OWN_PRIOR  # sum of the tables' acceptance probabilities

    @property
    def factor(self) -> float:
        return self.hits / self.expected

    def learn(self, expected: float, hit: bool) -> None:
        self.hits += hit
        self.expected += expected
        if self.expected > OWN_MEMORY:
            self.hits, self.expected = self.hits / 2, self.expected / 2


class AcceptanceEstimator:
    """Acceptance probabilities of drafted tokens, given that all tokens before them are accepted."""

    def __init__(self) -> None:
        self._calibrations: dict[Key, _Calibration] = {}
        self._records: dict[Sequence, dict[str, _SequenceRecord]] = {}
        self._pending: dict[Sequence, dict[str, _PendingDraft]] = {}  # by drafter

    def tables(self, sequence: Sequence, method: str) -> list[CalibrationTable]:
        """Tables of a drafter by draft position, counted from 0; the last one also serves positions from PLACES on."""
        return self._record(sequence, method).calibration.tables

    def counts(self, sequence: Sequence, method: str) -> NDArray[np.float64]:
        """[PLACES + 1, 2, bins] tries and hits in these tables."""
        return self._record(sequence, method).calibration.counts

    def table(self, sequence: Sequence, method: str, place: int) -> CalibrationTable:
        """Table of a drafter at a draft position."""
        return self.tables(sequence, method)[min(place, PLACES)]

    def factor(self, sequence: Sequence, method: str) -> float:
        """Accepted tokens of this drafter in this sequence, relative to those the tables expect; 1 without a record."""
        return self._record(sequence, method).factor

    def _record(self, sequence: Sequence, method: str) -> _SequenceRecord:
        records = self._records.setdefault(sequence, {})
        record = records.get(method)
        if record is None:
            key = method, _temperature_class(sequence)
            if key not in self._calibrations:
                self._calibrations[key] = _Calibration()
            record = records[method] = _SequenceRecord(self._calibrations[key])
        return record

    def prefix_probabilities(self, sequence: Sequence, draft: Draft, least: float) -> Seq[float]:
        """Probabilities that the first 1, 2, ... tokens of a draft are all accepted, as far as they exceed `least`."""
        probabilities, product = [], 1.0
        record = self._record(sequence, draft.method)
        tables, factor = record.calibration.tables, record.factor
        for place in range(len(draft.tokens)):
            product *= min(1.0, factor * tables[min(place, PLACES)].probability(score_of(draft, place)))
            if product <= least:
                break
            probabilities.append(product)
        return probabilities

    def leaf_probability(self, sequence: Sequence, method: str, leaf: Leaf) -> float:
        """Acceptance probability of a leaf, given that the tokens before it are accepted."""
        return self._leaf_table(sequence, method, leaf).probability(leaf.score)

    def _leaf_table(self, sequence: Sequence, method: str, leaf: Leaf) -> CalibrationTable:
        return self.table(sequence, f"{method}, choice {leaf.rank + 1}", leaf.place)

    def record_draft(self, sequence: Sequence, draft: Draft) -> None:
        """Remembers a draft before it is cut, unless the drafter's last draft is still being compared."""
        pending = self._pending.setdefault(sequence, {})
        if draft.method not in pending:
            pending[draft.method] = _PendingDraft(draft, len(sequence.tokens))

    def record_outcomes(self, sequence: Sequence) -> None:
        """Compares pending drafts with the committed tokens, each up to its first miss.

        Tokens that were cut from a draft are compared too when the text gets there.
        """
        pending_drafts = self._pending.get(sequence)
        if not pending_drafts:
            return
        tokens = sequence.tokens
        for method, pending in list(pending_drafts.items()):
            record, guesses = self._record(sequence, method), pending.draft.tokens
            hit = True
            while hit and pending.place < len(guesses) and pending.start + pending.place < len(tokens):
                place = pending.place
                table, score = record.calibration.tables[min(place, PLACES)], score_of(pending.draft, place)
                hit = guesses[place] == tokens[pending.start + place]
                if place <= PLACES:  # a single long copy must not dominate the table
                    record.learn(table.probability(score), hit)
                    table.learn(score, hit)
                    for leaf in pending.draft.leaves:
                        if leaf.place == place:
                            is_right = leaf.token == tokens[pending.start + place]
                            self._leaf_table(sequence, method, leaf).learn(leaf.score, is_right)
                pending.place += 1
            if not hit or pending.place == len(guesses):
                del pending_drafts[method]

    def release(self, sequence: Sequence) -> None:
        self._pending.pop(sequence, None)
        self._records.pop(sequence, None)

    def first_token_rate(self, method: str) -> tuple[float, float]:
        """(number of drafts, acceptance rate) of a drafter's first tokens in ordinary sequences, recent drafts only."""
        own = (each for key, each in self._calibrations.items() if key[0] == method and key[1] != UNUSUAL)
        firsts = [each.tables[0] for each in own]
        tries = sum(table.num_tries for table in firsts)
        return tries, sum(table.num_hits for table in firsts) / max(tries, 1.0)


def score_of(draft: Draft, place: int) -> float:
    """Score of the draft's token at `place`."""
    return draft.scores[place] if place < len(draft.scores) else NO_SCORE


def _temperature_class(sequence: Sequence) -> int:
    if not sequence.is_ordinary:
        return UNUSUAL
    temperature = sequence.row_constants.temperature
    return 0 if temperature < GREEDY_BELOW else 1 if temperature < WARM else 2
