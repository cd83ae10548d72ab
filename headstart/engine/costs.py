"""What passes and drafts cost on this machine: measured once, then corrected by every step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Self

KNOTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
RATE = 0.05
"""Share of a surprise that is believed at once."""
DRIFT = 0.2
"""Of that, the share that holds for counts not seen, too: a machine is slower or faster as a whole now and then."""
OUTLIER = 2.0
"""A step that took more than so many times what was expected counts as that many: somebody else had the core."""
TRIAL, TRIAL_RATE = 8, 0.25
"""Costs of an earlier start follow the machine as a whole for so many passes, by this share of each surprise."""
MANY = 8
"""So many missed pairs for each drafted token say what making up for them costs; fewer are part of a draft."""


def undisturbed(seconds: Seq[float]) -> float:
    """The lower quartile: what others do on the machine only ever adds."""
    return sorted(seconds)[len(seconds) // 4]


@dataclass
class Curve:
    """Seconds by a count of 1 or more: `scale` times what is piecewise linear between KNOTS, and on beyond the last."""

    seconds: list[float]
    scale: float = 1.0

    @classmethod
    def fit(cls, samples: Mapping[int, Seq[float]]) -> Self:
        """Through what was measured. Knots between counts lie on the line; those beyond the last grow as fast as
        between the last two, or by a twentieth of the first for each count where only one was measured."""
        points = sorted((count, undisturbed(values)) for count, values in samples.items())
        counts, seconds = [count for count, _ in points], [value for _, value in points]
        for i in range(1, len(seconds)):  # noise must not make more rows look cheaper
            seconds[i] = max(seconds[i], seconds[i - 1])
        slope = seconds[0] / 20
        if len(points) > 1:
            slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        return cls([_interpolate(knot, counts, seconds, slope) for knot in KNOTS])

    def at(self, count: float) -> float:
        low, share = _place(count)
        return self.scale * (self.seconds[low] + share * (self.seconds[low + 1] - self.seconds[low]))

    def learn(self, count: float, factor: float) -> None:
        """What was expected at `count` was wrong by `factor` (measured / expected)."""
        surprise = RATE * _bounded(factor)
        low, share = _place(count)
        share = min(share, 1.0)
        self.scale *= 1 + DRIFT * surprise
        self.seconds[low] *= 1 + (1 - DRIFT) * (1 - share) * surprise
        self.seconds[low + 1] *= 1 + (1 - DRIFT) * share * surprise


def _bounded(factor: float) -> float:
    """What may be believed of a surprise, by which share it was more or less."""
    return min(max(factor, 1 / OUTLIER), OUTLIER) - 1


def _place(count: float) -> tuple[int, float]:
    """The knot below and the share of the way to the next; beyond 1 past the last."""
    low = min(max(bisect_left(KNOTS, count) - 1, 0), len(KNOTS) - 2)
    return low, (count - KNOTS[low]) / (KNOTS[low + 1] - KNOTS[low])


def _interpolate(at: int, counts: Seq[int], seconds: Seq[float], slope: float) -> float:
    high = bisect_left(counts, at)
    if high == len(counts):
        return seconds[-1] + slope * (at - counts[-1])
    if high == 0:
        return seconds[0] * (1 if at >= counts[0] else at / counts[0])
    share = (at - counts[high - 1]) / (counts[high] - counts[high - 1])
    return seconds[high - 1] + share * (seconds[high] - seconds[high - 1])


@dataclass(frozen=True)
class Work:
    """One pass: `rows` that are sampled, `prompt_rows` that are not, and `reach`, the sum of their positions."""

    rows: int
    prompt_rows: int = 0
    reach: int = 0


@dataclass
class Costs:
    """Seconds. `passes`: of a pass by its sampled rows, with sampling and all Python of the step, at position 0.
    `prompt_share`: of a row that is not sampled, against one that is. `reach`: per row and position that it attends
    to. `drafts`: of one draft step by its sequences. `catch_up`: per pair that a head has to make up for. `busy`:
    others had the cores while this was measured. `trial`: for so many passes all of it follows the machine, which may
    be slower or faster as a whole than when it was measured."""

    passes: Curve
    drafts: Curve
    prompt_share: float = 1.0
    reach: float = 0.0
    catch_up: float = 0.0
    busy: bool = False
    trial: int = 0

    @classmethod
    def unknown(cls) -> Self:
        """Before anything is measured: a millisecond, a draft a tenth of it."""
        return cls(Curve.fit({1: [1e-3]}), Curve.fit({1: [1e-4]}))

    def of_pass(self, work: Work) -> float:
        return self.passes.at(work.rows + self.prompt_share * work.prompt_rows) + self.reach * work.reach

    def of_draft(self, steps: Seq[int], missed: int) -> float:
        """Draft steps over so many sequences each, after `missed` pairs more than one for each sequence."""
        return sum(self.drafts.at(count) for count in steps) + self.catch_up * missed

    def passed(self, work: Work, seconds: float) -> None:
        """A pass took so long. One that is mostly prompts says little about the others."""
        if work.prompt_rows > work.rows:
            return
        factor = seconds / self.of_pass(work)
        if not self.trial:
            self.passes.learn(work.rows + self.prompt_share * work.prompt_rows, factor)
            return
        self.trial -= 1
        for curve in (self.passes, self.drafts):
            curve.scale *= 1 + TRIAL_RATE * _bounded(factor)

    def drafted(self, steps: Seq[int], missed: int, seconds: float) -> None:
        """A draft took so long. One that mostly made up for missed pairs says little about a step."""
        expected = self.of_draft(steps, missed)
        if steps and self.catch_up * missed < expected / 4:
            self.drafts.learn(max(steps), seconds / expected)

    def document(self) -> dict[str, Any]:
        return {
            "knots": list(KNOTS),
            "passes": [self.passes.at(knot) for knot in KNOTS],
            "drafts": [self.drafts.at(knot) for knot in KNOTS],
            "prompt_share": self.prompt_share,
            "reach": self.reach,
            "catch_up": self.catch_up,
            "busy": self.busy,
        }

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Raises ValueError, KeyError or TypeError for what `document` has not written."""
        if list(document["knots"]) != list(KNOTS):
            raise ValueError("other knots")
        passes, drafts = (Curve([float(value) for value in document[name]]) for name in ("passes", "drafts"))
        if any(len(curve.seconds) != len(KNOTS) or min(curve.seconds) <= 0 for curve in (passes, drafts)):
            raise ValueError("curves without sense")
        share, reach, catch_up = (float(document[name]) for name in ("prompt_share", "reach", "catch_up"))
        return cls(passes, drafts, share, reach, catch_up, bool(document["busy"]))


@dataclass
class Samples:
    """Measured steps, gathered for a fit."""

    passes: dict[int, list[float]] = field(default_factory=dict)  # by rows
    drafts: dict[int, list[float]] = field(default_factory=dict)  # one step, by sequences
    prompts: list[tuple[Work, float]] = field(default_factory=list)
    caught_up: list[tuple[int, int, float]] = field(default_factory=list)  # missed pairs, draft steps, seconds

    def passed(self, work: Work, seconds: float) -> None:
        if work.prompt_rows:
            self.prompts.append((work, seconds))
        else:
            self.passes.setdefault(work.rows, []).append(seconds)

    def drafted(self, steps: Seq[int], missed: int, seconds: float) -> None:
        if missed > MANY * sum(steps):
            self.caught_up.append((missed, len(steps), seconds))
        elif min(steps) == max(steps):
            self.drafts.setdefault(steps[0], []).append(seconds / len(steps))
