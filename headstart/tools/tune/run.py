"""`headstart tune`: which drafter, and how deep, pays on this machine for this model and workload."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import mean
from typing import Any

from headstart.config import AUTO, FIXED_DEPTH, Depth, EngineConfig
from headstart.core import Progress, Report, no_progress
from headstart.engine.load import Model, load_model, other_heads
from headstart.errors import UsageError
from headstart.tools.bench import workloads
from headstart.tools.bench.document import Cell, Interval
from headstart.tools.bench.inprocess import InProcess
from headstart.tools.bench.measure import OFF, Load, measure, warm_up
from headstart.tools.bench.statistics import speedup
from headstart.tools.tune.setting import Setting, keep, kept_setting

DEPTHS = (FIXED_DEPTH, 2, 1, 5)
FEWEST_PAIRS, MOST_ROUNDS = 6, 12
"""Pairs with plain decoding that a verdict needs; rounds, each with a pair for every load, after which all is known."""
CLEAR = 0.01
"""A candidate is out when it is slower than the best by this much and the intervals do not touch; drafting pays when it
is faster by this much and its interval does not reach down to a loss of as much. It does not pay where the interval of
the best stays below 1. Between the two nothing is decided, and nothing is kept: `auto` decides step by step."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What to tune for. `minutes`: when to stop at the latest, with loading, with what is known by then. A short time
    is for few candidates: those that most likely are the best."""

    model: str | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    workload: str = "mixed"
    concurrency: tuple[int, ...] = (1, 4)
    minutes: float = 5.0
    retune: bool = False


@dataclass
class Candidate:
    """A drafter at a depth; `cells` of all its runs, those of plain decoding beside them in `plain`."""

    drafter: str
    depth: Depth
    runner: InProcess
    cells: list[Cell] = field(default_factory=list)
    out: bool = False
    warm: bool = False

    @property
    def name(self) -> str:
        return f"{self.drafter} {self.depth}"

    def gain(self, plain: list[Cell]) -> Interval | None:
        """Speed-up over plain decoding; pairs of all loads count alike."""
        return speedup(plain, self.cells)


def run(options: TuneOptions, progress: Progress = no_progress) -> Report:
    """Measure until one candidate is clearly the best or the time is over, and keep the setting, if there is enough to
    tell. A setting that is kept already is shown instead, unless `retune`. Raises UsageError for a model without
    anything to tune."""
    known = None if options.retune else kept_setting(options.model, options.config)
    if known is not None and known.workload == options.workload:
        return Report(True, {"kept": True, "choice": vars(known)}, [f"tuned before: {known}", "again: --retune"])
    tuning = _Tuning(options, progress)
    tuning.measure()
    setting, rows = tuning.setting(), tuning.rows()
    data = {"kept": False, "choice": setting and vars(setting), "candidates": rows, "pairs": tuning.rounds}
    if setting is None:
        return Report(True, data | {"path": None}, tuning.undecided())
    path = keep(options.model, options.config, setting)
    return Report(True, data | {"path": str(path)}, [str(setting), f"kept in {path}; serve and launch use it"])


class _Tuning:
    """A tuning in progress."""

    def __init__(self, options: TuneOptions, progress: Progress) -> None:
        self.options, self._progress = options, progress
        self._deadline = time.monotonic() + 60 * options.minutes
        progress(0, 1, "loading")
        most = max(options.config.max_num_seqs, *options.concurrency)
        config = replace(options.config, depth=AUTO, max_num_seqs=most)
        model = load_model(options.model, config)
        self.candidates = [
            Candidate(runner_drafter, depth, runner)
            for runner_drafter, runner in _runners(model, config)
            for depth in (AUTO, *DEPTHS)
            if depth == AUTO or depth <= runner.max_depth
        ]
        self.candidates.sort(key=lambda each: each.depth != AUTO)  # what most likely is the best comes first
        self._first = self.candidates[0].runner
        (self.workload,) = workloads.find(options.workload, self._first.count_tokens)[:1]
        self.plain: list[Cell] = []
        self.rounds = 0
        self._seconds = 0.0  # of the longest cell so far

    def measure(self) -> None:
        """Rounds of all candidates that are still in, plain decoding in each, order alternating."""
        self._screen()
        while self.rounds < MOST_ROUNDS and self._fits():
            for load in [Load(concurrency=count) for count in self.options.concurrency]:
                self._round(load)
            self.rounds += 1
            if self.rounds * len(self.options.concurrency) >= FEWEST_PAIRS and self._decided():
                return

    def _screen(self) -> None:
        """Leave as many candidates as there is time to tell anything of: the first ones. One round of plain decoding
        tells how long a cell takes."""
        begun = time.monotonic()
        warm_up(self._first, self.workload, OFF)
        for count in self.options.concurrency:
            self._progress(0, 1, "how long does it take")
            self._timed(lambda load: measure(self._first, self.workload, OFF, load), Load(concurrency=count))
        round_s, now = time.monotonic() - begun, time.monotonic()
        rounds = math.ceil(FEWEST_PAIRS / len(self.options.concurrency))
        self.candidates = self.candidates[: max(int((self._deadline - now) / (rounds * round_s)) - 1, 1)]

    def _timed(self, run: Callable[[Load], Cell], load: Load) -> Cell:
        begun = time.monotonic()
        cell = run(load)
        self._seconds = max(self._seconds, time.monotonic() - begun)
        return cell

    def _fits(self) -> bool:
        """Is there time for one more cell?"""
        return time.monotonic() + self._seconds < self._deadline

    def _round(self, load: Load) -> None:
        running = [None, *(each for each in self.candidates if not each.out)]
        for number, candidate in enumerate(running if self.rounds % 2 == 0 else running[::-1]):
            if not self._fits():
                return
            name = candidate.name if candidate else OFF
            self._progress(
                self.rounds * len(running) + number, MOST_ROUNDS * len(running), f"round {self.rounds + 1}: {name}"
            )
            self._measure(candidate, load)

    def _measure(self, candidate: Candidate | None, load: Load) -> None:
        runner, mode = (candidate.runner, str(candidate.depth)) if candidate else (self._first, OFF)
        if candidate and not candidate.warm:
            warm_up(runner, self.workload, mode)
            candidate.warm = True
        cell = self._timed(lambda load: measure(runner, self.workload, mode, load, repeat=self.rounds), load)
        (candidate.cells if candidate else self.plain).append(cell)

    def _decided(self) -> bool:
        """Put out who cannot win any more; is one left?"""
        gains = {each.name: each.gain(self.plain) for each in self.candidates if not each.out}
        points = {name: gain for name, gain in gains.items() if gain and gain.low is not None}
        best = max(points.values(), key=lambda gain: gain.point, default=None)
        if best is None or best.low is None:
            return False
        for each in self.candidates:
            gain = points.get(each.name)
            if gain and gain.high is not None and gain.high < best.low and gain.point < (1 - CLEAR) * best.point:
                each.out = True
        return sum(not each.out for each in self.candidates) == 1

    def _best(self) -> tuple[Candidate, Interval] | None:
        """Of those within CLEAR of the best the one that decides itself, which also knows other loads."""
        gains = [(each, gain) for each in self.candidates if not each.out and (gain := each.gain(self.plain))]
        top = max((gain.point for _, gain in gains), default=0.0)
        close = [(each, gain) for each, gain in gains if gain.point >= (1 - CLEAR) * top]
        return max(close, key=lambda pair: (pair[0].depth == AUTO, pair[1].point), default=None)

    def setting(self) -> Setting | None:
        """The best, or plain decoding where that is clearly faster; None where too little is known."""
        if (best := self._best()) is None:
            return None
        each, gain = best
        low, high = gain.low, gain.high
        if low is None or high is None or gain.pairs < FEWEST_PAIRS:
            return None
        pays = gain.point >= 1 + CLEAR and low >= 1 - CLEAR
        if not pays and high >= 1:
            return None
        return Setting(
            drafter=each.drafter if pays else "none",
            depth=each.depth if pays else 0,
            workload=self.workload.name,
            concurrency=self.options.concurrency,
            speedup=(gain.point, low, high),
        )

    def undecided(self) -> list[str]:
        best = self._best()
        seen = f"{best[0].name} has {best[1]}, pairs: {best[1].pairs}" if best else "nothing was measured"
        more = "on a quieter machine" if best and best[1].pairs >= FEWEST_PAIRS else "with more --minutes"
        return [
            f"nothing decided: {seen}; a verdict needs {FEWEST_PAIRS}, and an interval on one side of 1",
            f"nothing is kept, depth auto goes on deciding step by step; tune again {more}",
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Plain decoding first, then the candidates, the best before the others."""
        documents: list[dict[str, Any]] = []
        for each in self.candidates:
            gain = each.gain(self.plain)
            lengths = [cell.speculation.acceptance_length for cell in each.cells if cell.speculation]
            documents.append(
                {
                    "drafter": each.drafter,
                    "depth": each.depth,
                    "speedup": gain.point if gain else None,
                    "low": gain.low if gain else None,
                    "high": gain.high if gain else None,
                    "pairs": gain.pairs if gain else 0,
                    "acceptance_length": mean(lengths) if lengths else 1.0,
                }
            )
        documents.sort(key=lambda row: -(row["speedup"] or 0))
        return [{"drafter": "none", "depth": 0, "speedup": 1.0, "low": None, "high": None, "pairs": self.rounds,
                 "acceptance_length": 1.0}, *documents]  # fmt: skip


def _runners(model: Model, config: EngineConfig) -> list[tuple[str, InProcess]]:
    """An engine for each way to draft that the model offers: its head with lookup beside it, other heads that come with
    it, and lookup alone."""
    if config.drafter == "none":
        raise UsageError("--drafter none leaves nothing to tune", "leave it out")
    ways = [(config.drafter, model)]
    if config.drafter == AUTO:
        others = [] if config.head else other_heads(model).items()
        ways = [*([("mixed", model)] if model.head else []), *others, ("ngram", model)]
    blocks: int | None = config.kv_blocks
    runners = []
    for drafter, headed in ways:
        runner = InProcess(headed, replace(config, drafter=drafter, kv_blocks=blocks))
        blocks = runner.kv_blocks
        runners.append((drafter, runner))
    return runners
