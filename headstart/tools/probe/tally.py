"""Answers, counted by condition; and what the counts say. Pure functions: no server is asked here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal

from headstart.tools.probe.asking import Said
from headstart.tools.probe.cases import Case, sampling_of

Condition = Literal["again", "there again", "warm", "streamed", "drafting", "company"]
CONDITIONS: dict[Condition, str] = {
    "again": "asked twice, alone",
    "there again": "asked twice, alone, at --against",
    "warm": "prefix cache cold and warm",
    "streamed": "streamed and whole",
    "drafting": "drafting on and off",
    "company": "alone and in company",
}
CONTROLS: tuple[Condition, ...] = ("again", "there again")
"""Where one request differs from itself, nothing else can be blamed for a difference."""
Outcome = Literal["equal", "differs", "cannot tell"]
Verdict = Literal["exact", "differences", "not reproducible"]
CONFIDENCE = 0.95
AROUND = 30
"""Characters shown before and behind a first difference."""


@dataclass(frozen=True)
class Difference:
    """Where two answers part: characters and tokens (None: not told) that they share, and both texts around that."""

    case: str
    character: int
    token: int | None
    one: str
    other: str


def difference(case: Case, one: Said, other: Said) -> Difference:
    """Of two texts that are not the same."""
    place = _shared(one.text, other.text)
    token = None
    if one.token_ids is not None and other.token_ids is not None:
        token = _shared(one.token_ids, other.token_ids)
    start = max(0, place - AROUND)
    shown = [each.text[start : place + AROUND] for each in (one, other)]
    return Difference(str(case), place, token, *shown)


def _shared(one: Seq[Any], other: Seq[Any]) -> int:
    """How many members both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def upper_bound(differences: int, trials: int, confidence: float = CONFIDENCE) -> float:
    """The largest rate at which no more differences than these would be seen with a chance of 1 - confidence: the
    one-sided limit of Clopper and Pearson (Biometrika 26, 1934); without a difference about 3 / trials."""
    if differences >= trials:
        return 1.0

    def chance(rate: float) -> float:
        return sum(math.comb(trials, k) * rate**k * (1 - rate) ** (trials - k) for k in range(differences + 1))

    low, high = differences / trials, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if chance(middle) > 1 - confidence else (low, middle)
    return high


@dataclass
class Cell:
    """Trials of one condition in one case."""

    trials: int = 0
    differences: int = 0
    first: Difference | None = None


@dataclass(frozen=True)
class Row:
    """A condition, greedy or sampled. `forms`: (differences, trials) of each form of request."""

    condition: Condition
    sampling: str
    trials: int
    differences: int
    outcome: Outcome
    forms: dict[str, tuple[int, int]]
    first: Difference | None

    @property
    def bound(self) -> float:
        return upper_bound(self.differences, self.trials)

    def document(self) -> dict[str, Any]:
        forms = {form: {"differences": found, "trials": trials} for form, (found, trials) in self.forms.items()}
        return {
            "condition": self.condition,
            "means": CONDITIONS[self.condition],
            "sampling": self.sampling,
            "trials": self.trials,
            "equal": self.trials - self.differences,
            "outcome": self.outcome,
            "upper_bound": round(self.bound, 4),
            "forms": forms,
            "first_difference": vars(self.first) if self.first else None,
        }


@dataclass
class Tally:
    """All that was compared."""

    cells: dict[tuple[Condition, Case], Cell] = field(default_factory=dict)

    def add(self, condition: Condition, case: Case, one: Said, other: Said, *, known: Iterable[Said] = ()) -> bool:
        """Compare two answers; returns whether they are the same. `known`: what the same request has also been answered
        with under the same condition as `one`; the text of any of them is no difference of this condition."""
        cell = self.cells.setdefault((condition, case), Cell())
        same = other.text in {one.text, *(each.text for each in known)}
        cell.trials += 1
        if not same:
            cell.differences += 1
            cell.first = cell.first or difference(case, one, other)
        return same

    def rows(self) -> list[Row]:
        """In the order of the conditions, greedy first."""
        return [row for name in CONDITIONS for sampled in (False, True) if (row := self._row(name, sampled))]

    def _row(self, condition: Condition, sampled: bool) -> Row | None:
        cells = {case.form: cell for (name, case), cell in self.cells.items()
                 if name == condition and case.sampled == sampled}  # fmt: skip
        trials, found = sum(cell.trials for cell in cells.values()), sum(cell.differences for cell in cells.values())
        if not trials:
            return None
        outcome: Outcome = "differs" if found else "equal"
        if found and condition not in CONTROLS and self._unsteady(condition, sampled):
            outcome = "cannot tell"
        return Row(
            condition=condition,
            sampling=sampling_of(sampled),
            trials=trials,
            differences=found,
            outcome=outcome,
            forms={form: (cell.differences, cell.trials) for form, cell in cells.items()},
            first=next((cell.first for cell in cells.values() if cell.first), None),
        )

    def _unsteady(self, condition: Condition, sampled: bool) -> bool:
        """Has a control of this condition failed?"""
        controls = CONTROLS if condition == "drafting" else CONTROLS[:1]
        return any(
            cell.differences
            for (name, case), cell in self.cells.items()
            if name in controls and case.sampled == sampled
        )  # fmt: skip


def verdict_of(rows: Iterable[Row]) -> Verdict:
    """`not reproducible`: some requests differ from themselves, and nothing else was found."""
    differing = [row for row in rows if row.outcome == "differs"]
    if any(row.condition not in CONTROLS for row in differing):
        return "differences"
    return "not reproducible" if differing else "exact"
