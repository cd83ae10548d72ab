"""Costs of passes and drafts on this machine: measured once, then corrected by every step."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import linear_regression
from typing import Any, NamedTuple, Self

KNOTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Row counts at which a cost curve has its knots."""
RATE = 0.05  # share of a deviation that a step corrects
DRIFT = 0.5
"""Share of the correction that applies to all counts: now and then a machine becomes slower or faster as a whole. With
a small share, a machine that becomes faster while all passes have four rows seems to have free rows (docs/log)."""
OUTLIER = 2.0
"""Ratios of measured to expected time are limited to this one: slower steps shared the cores with other processes."""
TRIAL, TRIAL_RATE = 8, 0.25
"""After stored costs are loaded, each of the first TRIAL passes scales all curves by TRIAL_RATE of its deviation."""
MIN_FURTHER = 0.05  # minimum of Costs.further
MANY = 8
"""With more uncached pairs (hidden state, token) than MANY per drafted token, a draft measures `Costs.catch_up`. With
fewer, computing them counts as part of a draft step."""


def lower_quartile(seconds: Seq[float]) -> float:
    """The lower quartile: other processes only ever add time."""
    return sorted(seconds)[len(seconds) // 4]


@dataclass
class CostCurve:
    """Seconds as a function of a count >= 1: piecewise linear between KNOTS, extrapolated beyond, times `scale`."""

    seconds: list[float]  # at each knot
    scale: float = 1.0

    @classmethod
    def fit(cls, samples: Mapping[int, Seq[float]]) -> Self:
        """Curve through measured points, and on with its last slope (one point: a twentieth of its value)."""
        points = sorted((count, lower_quartile(values)) for count, values in samples.items())
        counts, seconds = [count for count, _ in points], [value for _, value in points]
        for i in range(1, len(seconds)):  # noise must not make more rows look cheaper
            seconds[i] = max(seconds[i], seconds[i - 1])
        slope = seconds[0] / 20
        if len(points) > 1:
            slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
        return cls([_interpolate(knot, counts, seconds, slope) for knot in KNOTS])

    def at(self, count: float) -> float:
        low, share = _knot_below(count)
        return self.scale * (self.seconds[low] + share * (self.seconds[low + 1] - self.seconds[low]))

    def learn(self, count: float, factor: float) -> None:
        """Corrects the curve at `count`, where the ratio measured / expected was `factor`."""
        correction = RATE * _bounded(factor)
        low, share = _knot_below(count)
        share = min(share, 1.0)
        self.scale *= 1 + DRIFT * correction
        self.seconds[low] *= 1 + (1 - DRIFT) * (1 - share) * correction
        self.seconds[low + 1] *= 1 + (1 - DRIFT) * share * correction


def _bounded(factor: float) -> float:
    """Relative deviation of a ratio measured / expected, after limiting the ratio by OUTLIER."""
    return min(max(factor, 1 / OUTLIER), OUTLIER) - 1


@lru_cache(1024)
def _knot_below(count: float) -> tuple[int, float]:
    """Index of the knot below, and the fraction of the way to the next one; above 1 beyond the last knot."""
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


class PassShape(NamedTuple):
    """Size of one pass."""

    rows: int  # rows that are sampled
    prompt_rows: int = 0  # rows that are not sampled
    reach: int = 0  # sum of the rows' positions


@dataclass
class Costs:
    """Costs in seconds."""

    passes: CostCurve  # of a pass by its sampled rows, with sampling and all Python of a step, at position 0
    drafts: CostCurve  # of the first step of a draft by its number of sequences, with all Python of a draft
    prompt_share: float = 1.0  # cost of a row that is not sampled, relative to a sampled row
    reach: float = 0.0  # per row and position that the row attends to
    catch_up: float = 0.0  # per uncached pair that a head computes
    busy: bool = False  # other processes used the cores during the measurement
    trial: int = 0  # passes left in which the costs are rescaled as a whole
    further: float = 1.0  # of each further step of a draft, relative to the first

    @classmethod
    def unknown(cls) -> Self:
        """Costs before any measurement: a millisecond per pass, a tenth of it per draft step."""
        return cls(CostCurve.fit({1: [1e-3]}), CostCurve.fit({1: [1e-4]}))

    def weighted_rows(self, work: PassShape) -> float:
        """Number of sampled rows that cost as much as all rows of the pass."""
        return work.rows + self.prompt_share * work.prompt_rows

    def pass_seconds(self, work: PassShape) -> float:
        return self.passes.at(self.weighted_rows(work)) + self.reach * work.reach

    def draft_seconds(self, steps: Seq[int], num_uncached: int) -> float:
        """Seconds of draft steps over `steps[i]` sequences each, after `num_uncached` pairs beyond one per sequence."""
        first, further = sum(map(self.drafts.at, steps[:1])), sum(map(self.drafts.at, steps[1:]))
        return first + self.further * further + self.catch_up * num_uncached

    def record_pass(self, work: PassShape, seconds: float) -> None:
        """Learns from a pass. Passes with mostly prompt rows are ignored."""
        if work.prompt_rows > work.rows:
            return
        factor = seconds / self.pass_seconds(work)
        if not self.trial:
            self.passes.learn(self.weighted_rows(work), factor)
            return
        self.trial -= 1
        for curve in (self.passes, self.drafts):
            curve.scale *= 1 + TRIAL_RATE * _bounded(factor)

    def record_draft(self, steps: Seq[int], num_uncached: int, seconds: float) -> None:
        """Learns from a draft. Drafts that mostly computed uncached pairs are ignored."""
        expected, first = self.draft_seconds(steps, num_uncached), self.draft_seconds(steps[:1], num_uncached)
        if self.catch_up * num_uncached >= expected / 4:
            return
        self.drafts.learn(max(steps), seconds / expected)
        if len(steps) > 1:
            deviation = _bounded((seconds - first) / (expected - first))
            self.further = min(max(self.further * (1 + RATE * deviation), MIN_FURTHER), 1.0)

    def document(self) -> dict[str, Any]:
        return {
            "knots": list(KNOTS), "passes": [self.passes.at(knot) for knot in KNOTS],
            "drafts": [self.drafts.at(knot) for knot in KNOTS], "prompt_share": self.prompt_share, "reach": self.reach,
            "catch_up": self.catch_up, "busy": self.busy, "further": self.further,
        }  # fmt: skip

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Inverse of `document`. Raises ValueError, KeyError or TypeError for anything else."""
        if list(document["knots"]) != list(KNOTS):
            raise ValueError("other knots")
        passes, drafts = (CostCurve([float(value) for value in document[name]]) for name in ("passes", "drafts"))
        if any(len(curve.seconds) != len(KNOTS) or min(curve.seconds) <= 0 for curve in (passes, drafts)):
            raise ValueError("curves without sense")
        names = ("prompt_share", "reach", "catch_up", "further")
        share, reach, catch_up, further = (float(document[name]) for name in names)
        return cls(passes, drafts, share, reach, catch_up, bool(document["busy"]), further=further)


@dataclass
class CostSamples:
    """Measured steps, for a fit."""

    passes: dict[int, list[float]] = field(default_factory=dict)  # row count -> seconds
    # (number of sequences, draft steps) -> seconds
    drafts: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    prompts: list[tuple[PassShape, float]] = field(default_factory=list)  # passes with prompt rows, and their seconds
    caught_up: list[tuple[int, int, float]] = field(default_factory=list)  # uncached pairs, draft steps, seconds

    def record_pass(self, work: PassShape, seconds: float) -> None:
        if work.prompt_rows:
            self.prompts.append((work, seconds))
        else:
            self.passes.setdefault(work.rows, []).append(seconds)

    def record_draft(self, steps: Seq[int], num_uncached: int, seconds: float) -> None:
        if num_uncached > MANY * sum(steps):
            self.caught_up.append((num_uncached, len(steps), seconds))
        elif min(steps) == max(steps):
            self.drafts.setdefault((steps[0], len(steps)), []).append(seconds)

    def further(self) -> float:
        """`Costs.further`: slope of the seconds by the number of draft steps, relative to the first step. 1 if all
        drafts of one sequence have the same number of steps."""
        own = {steps: lower_quartile(seconds) for (count, steps), seconds in self.drafts.items() if count == 1}
        if len(own) < 2:
            return 1.0
        slope, start = linear_regression(list(own), list(own.values()))
        return min(max(slope / max(start + slope, 1e-9), MIN_FURTHER), 1.0)
