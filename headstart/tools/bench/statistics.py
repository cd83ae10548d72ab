"""Ratios of speeds with their uncertainty, and the never-slower check.

Cells of the same workload, load and repeat are a pair: they ran right after each other, so what slows the machine down
for longer hits both. The estimate is the median over pairs of log(on / off): one pair that a neighbour of the machine
has spoiled moves it little. The interval is the percentile bootstrap of that median: pairs are drawn anew, with
replacement, RESAMPLES times under a fixed seed; it reaches from 2.5 % to 97.5 %, so that its lower end is a stricter
bound than a one-sided one of 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from functools import lru_cache

import numpy as np

from headstart.core import Float32
from headstart.tools.bench.document import Cell, Check, Group, Interval

RESAMPLES = 10_000
TAIL = 0.025
FEWEST_FOR_INTERVAL = 3
FEWEST_PAIRS = 10
"""Pairs that a verdict needs."""
POINT_AT_LEAST, LOW_AT_LEAST = 0.98, 0.95
NEAR_BEST = 0.97


def speedup(off: Iterable[Cell], on: Iterable[Cell], *, seed: int = 0) -> Interval | None:
    """How many times as fast `on` is as `off`, over their pairs; None when there is no complete pair."""
    return paired(tuple(_pairs(off, on)), seed=seed)


@lru_cache(maxsize=4096)  # documents are written again and again while they grow
def paired(pairs: tuple[tuple[float, float], ...], *, seed: int = 0) -> Interval | None:
    """The same of (speed before, speed after)."""
    logs = np.array([math.log(after / before) for before, after in pairs if before > 0 and after > 0])
    if not len(logs):
        return None
    return _interval(float(np.median(logs)), len(logs), lambda: _medians(logs, seed))


def unpaired(before: Seq[float], after: Seq[float], *, seed: int = 0) -> Interval | None:
    """Ratio of medians of runs that were not alternated, each side drawn anew; `pairs` is the smaller count. Drift of
    the machine between the two is not in the interval."""
    if not before or not after or min(*before, *after) <= 0:
        return None
    sides = [np.log(np.array(side)) for side in (before, after)]
    point = float(np.median(sides[1]) - np.median(sides[0]))
    return _interval(point, min(map(len, sides)), lambda: _medians(sides[1], seed) - _medians(sides[0], seed + 1))


def _interval(point: float, count: int, drawn: Callable[[], Float32]) -> Interval:
    """Of a log ratio and the same ratio of RESAMPLES samples."""
    if count < FEWEST_FOR_INTERVAL:
        return Interval(math.exp(point), None, None, count)
    low, high = np.exp(np.quantile(drawn(), (TAIL, 1 - TAIL))).tolist()
    return Interval(math.exp(point), low, high, count)


def _medians(values: Float32, seed: int) -> Float32:
    """[RESAMPLES] medians of samples drawn with replacement."""
    drawn = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    medians: Float32 = np.median(values[drawn], axis=1)
    return medians


def _pairs(off: Iterable[Cell], on: Iterable[Cell]) -> list[tuple[float, float]]:
    before = {(cell.group, cell.repeat): cell.speed for cell in off if cell.complete}
    return [
        (before[cell.group, cell.repeat], cell.speed)
        for cell in on
        if cell.complete and (cell.group, cell.repeat) in before
    ]


def never_slower(off: Seq[Cell], auto: Seq[Cell], *, seed: int = 0) -> Check:
    """Is a depth that decides itself at least as fast as no drafter at all, in one workload under one load? Over
    FEWEST_PAIRS pairs or more the speed-up is at least POINT_AT_LEAST and its lower bound at least LOW_AT_LEAST."""
    ratio = speedup(off, auto, seed=seed)
    if ratio is None or ratio.pairs < FEWEST_PAIRS or ratio.low is None:
        return _check("never slower", auto, None, ratio, _too_few(ratio))
    ok = ratio.point >= POINT_AT_LEAST and ratio.low >= LOW_AT_LEAST
    bounds = f"needs {POINT_AT_LEAST:g}x and a lower bound of {LOW_AT_LEAST:g}x"
    return _check("never slower", auto, ok, ratio, f"{ratio} of off over {ratio.pairs} pairs; {bounds}")


def near_best(fixed: Mapping[str, Seq[Cell]], auto: Seq[Cell], *, seed: int = 0) -> Check:
    """Is it within 3 % of the best fixed depth? The best is chosen on pairs of even `repeat` and compared with on the
    odd ones, since the best of several noisy numbers is too good. `fixed`: cells by mode, "off" may be one."""
    name = "near the best depth"
    even, odd = ([cell for cell in auto if cell.repeat % 2 == rest] for rest in (0, 1))
    ratios = {mode: speedup(even, cells, seed=seed) for mode, cells in fixed.items()}
    known = {mode: ratio.point for mode, ratio in ratios.items() if ratio}
    best = max(known, key=known.__getitem__, default=None)
    ratio = speedup(fixed[best], odd, seed=seed) if best is not None else None
    if ratio is None or len(auto) < FEWEST_PAIRS:
        return _check(name, auto, None, ratio, _too_few(speedup(auto, fixed[best]) if best is not None else None))
    text = f"{ratio} of mode {best}, the best on even pairs, over {ratio.pairs} odd ones; needs {NEAR_BEST:g}x"
    return _check(name, auto, ratio.point >= NEAR_BEST, ratio, text)


def checks(cells: Iterable[Cell], *, seed: int = 0) -> list[Check]:
    """Both checks of every workload and load that has the modes for them."""
    groups: dict[Group, dict[str, list[Cell]]] = {}
    for cell in cells:
        if cell.complete:
            groups.setdefault(cell.group, {}).setdefault(cell.mode, []).append(cell)
    made = []
    for modes in groups.values():
        auto = modes.pop("auto", None)
        if auto and "off" in modes:
            made.append(never_slower(modes["off"], auto, seed=seed))
        if auto and len(modes) > 1:
            made.append(near_best(modes, auto, seed=seed))
    return made


def _too_few(ratio: Interval | None) -> str:
    return f"not judged: {ratio.pairs if ratio else 0} pairs, {FEWEST_PAIRS} are needed"


def _check(name: str, cells: Seq[Cell], ok: bool | None, ratio: Interval | None, text: str) -> Check:
    group = cells[0].group
    return Check(**group._asdict(), name=name, ok=ok, ratio=ratio, text=text)  # type: ignore[arg-type]
