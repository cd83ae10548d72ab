"""`headstart tune`: which drafter, and how deep, pays on this machine for this model and workload."""

from __future__ import annotations

import math
import time
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

DEPTHS = (1, 2, FIXED_DEPTH, 5)
FEWEST_PAIRS, MOST_PAIRS = 3, 12
CLEAR = 0.01
"""A candidate is out when it is slower than the best by this much and the intervals do not touch; drafting pays when it
is faster by this much and its interval does not reach down to a loss of as much."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What to tune for. `minutes`: when to stop at the latest, with what is known by then."""

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

    @property
    def name(self) -> str:
        return f"{self.drafter} {self.depth}"

    def gain(self, plain: list[Cell]) -> Interval | None:
        """Speed-up over plain decoding; pairs of all loads count alike."""
        return speedup(plain, self.cells)


def run(options: TuneOptions, progress: Progress = no_progress) -> Report:
    """Measure until one candidate is clearly the best or the time is over, and keep the setting. A setting that is kept
    already is shown instead, unless `retune`. Raises UsageError for a model without anything to tune."""
    known = None if options.retune else kept_setting(options.model, options.config)
    if known is not None and known.workload == options.workload:
        return Report(True, {"kept": True, "choice": vars(known)}, [f"tuned before: {known}", "again: --retune"])
    tuning = _Tuning(options, progress)
    tuning.measure()
    setting = tuning.setting()
    path = keep(options.model, options.config, setting)
    rows = tuning.rows()
    data = {"kept": False, "choice": vars(setting), "candidates": rows, "path": str(path), "pairs": tuning.rounds}
    return Report(True, data, [str(setting), f"kept in {path}; serve and launch use it"])


class _Tuning:
    """A tuning in progress."""

    def __init__(self, options: TuneOptions, progress: Progress) -> None:
        self.options, self._progress = options, progress
        progress(0, 1, "loading")
        most = max(options.config.max_num_seqs, *options.concurrency)
        config = replace(options.config, depth=AUTO, max_num_seqs=most)
        model = load_model(options.model, config)
        self.candidates = [
            Candidate(runner_drafter, depth, runner)
            for runner_drafter, runner in _runners(model, config)
            for depth in (*DEPTHS, AUTO)
            if depth == AUTO or depth <= runner.max_depth
        ]
        self._first = self.candidates[0].runner
        (self.workload,) = workloads.find(options.workload, self._first.count_tokens)[:1]
        self.plain: list[Cell] = []
        self.rounds = 0

    def measure(self) -> None:
        """Rounds of all candidates that are still in, plain decoding in each, order alternating."""
        deadline = time.monotonic() + 60 * self.options.minutes
        for candidate in self.candidates:
            warm_up(candidate.runner, self.workload, str(candidate.depth))
        while self.rounds < MOST_PAIRS and (self.rounds < 1 or time.monotonic() < deadline):
            for load in [Load(concurrency=count) for count in self.options.concurrency]:
                self._round(load)
            self.rounds += 1
            if self.rounds >= FEWEST_PAIRS and self._decided():
                return

    def _round(self, load: Load) -> None:
        running = [None, *(each for each in self.candidates if not each.out)]
        for number, candidate in enumerate(running if self.rounds % 2 == 0 else running[::-1]):
            name = candidate.name if candidate else OFF
            self._progress(
                self.rounds * len(running) + number, MOST_PAIRS * len(running), f"round {self.rounds + 1}: {name}"
            )
            if candidate is None:
                self.plain.append(measure(self._first, self.workload, OFF, load, repeat=self.rounds))
            else:
                mode = str(candidate.depth)
                candidate.cells.append(measure(candidate.runner, self.workload, mode, load, repeat=self.rounds))

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

    def setting(self) -> Setting:
        """The best; of those within CLEAR of it the one that decides itself, which also knows other loads."""
        gains = [(each, gain) for each in self.candidates if not each.out and (gain := each.gain(self.plain))]
        top = max(gain.point for _, gain in gains)
        close = [(each, gain) for each, gain in gains if gain.point >= (1 - CLEAR) * top]
        each, gain = max(close, key=lambda pair: (pair[0].depth == AUTO, pair[1].point))
        low, high = (gain.point if bound is None else bound for bound in (gain.low, gain.high))
        pays = gain.point >= 1 + CLEAR and low >= 1 - CLEAR
        return Setting(
            drafter=each.drafter if pays else "none",
            depth=each.depth if pays else 0,
            workload=self.workload.name,
            concurrency=self.options.concurrency,
            speedup=(gain.point, low, high),
        )

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
                    "speedup": gain.point if gain else math.nan,
                    "low": gain.low if gain else None,
                    "high": gain.high if gain else None,
                    "pairs": gain.pairs if gain else 0,
                    "acceptance_length": mean(lengths) if lengths else 1.0,
                }
            )
        documents.sort(key=lambda row: -row["speedup"])
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
