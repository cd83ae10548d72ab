"""`headstart tune`: which drafter, and how deep, pays on this machine for this model and workload."""

import math
import time
from dataclasses import astuple, dataclass, field, replace
from statistics import mean
from typing import Any

from headstart.config import AUTO, FIXED_DEPTH, Depth, EngineConfig
from headstart.core import Progress, Report, no_progress
from headstart.engine.load import Model, load_model, other_heads
from headstart.errors import UsageError
from headstart.tools.bench import workloads
from headstart.tools.bench.document import BenchCell, Interval
from headstart.tools.bench.inprocess import InProcessTarget
from headstart.tools.bench.measure import OFF, RequestLoad, measure, warm_up
from headstart.tools.bench.summary import speedup
from headstart.tools.saved import TunedSetting, load_setting, save_setting

DEPTHS = (FIXED_DEPTH, 2, 1, 5)
MIN_PAIRS, MAX_ROUNDS = 6, 12  # pairs with plain decoding that a verdict needs; rounds, each with a pair for every load
CLEAR = 0.01
"""A candidate is out when it is slower than the best by this share and the intervals do not touch. Drafting pays when
it is faster by this share and its interval does not reach down to a loss of as much; it does not pay where the interval
of the best stays below 1. Between the two nothing is saved: `auto` decides step by step."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    model: str | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    workload: str = "mixed"
    concurrency: tuple[int, ...] = (1, 4)
    minutes: float = 5.0  # at most, with loading; a short time is for few candidates
    retune: bool = False  # measure again although a setting is saved


@dataclass
class Candidate:
    drafter: str
    depth: Depth
    target: InProcessTarget
    cells: list[BenchCell] = field(default_factory=list)  # of all its runs
    is_out: bool = False
    is_warm: bool = False

    @property
    def name(self) -> str:
        return f"{self.drafter} {self.depth}"

    def gain(self, plain: list[BenchCell]) -> Interval | None:
        """Returns the speed-up over plain decoding; pairs of all loads count alike."""
        return speedup(plain, self.cells)


def run(options: TuneOptions, progress: Progress = no_progress) -> Report:
    """Measures until one candidate is clearly the best or the time is over, and saves the setting, if there is enough
    to tell. Shows a setting that is saved already. Raises UsageError for a model without anything to tune."""
    known = None if options.retune else load_setting(options.model, options.config)
    if known is not None and known.workload == options.workload:
        return Report(True, {"kept": True, "choice": vars(known)}, [f"tuned before: {known}", "again: --retune"])
    workloads.find(options.workload, len)  # errors come before a model is loaded
    tuning = TuningRun(options, progress)
    tuning.measure()
    setting, rows = tuning.setting(), tuning.rows()
    data = {"kept": False, "choice": setting and vars(setting), "candidates": rows, "pairs": tuning.rounds}
    if setting is None:
        return Report(True, data | {"path": None}, tuning.undecided())
    path = save_setting(options.model, options.config, setting)
    return Report(True, data | {"path": str(path)}, [str(setting), f"kept in {path}; serve and launch use it"])


class TuningRun:
    def __init__(self, options: TuneOptions, progress: Progress) -> None:
        self.options, self._progress = options, progress
        self._deadline = time.monotonic() + 60 * options.minutes
        progress(0, 1, "loading")
        max_num_seqs = max(options.config.max_num_seqs, *options.concurrency)
        config = replace(options.config, depth=AUTO, max_num_seqs=max_num_seqs)
        model = load_model(options.model, config)
        self.candidates = [
            Candidate(drafter, depth, target)
            for drafter, target in _targets(model, config)
            for depth in (AUTO, *DEPTHS)
            if depth == AUTO or depth <= target.max_depth
        ]
        self.candidates.sort(key=lambda each: each.depth != AUTO)  # what most likely is the best comes first
        self._first = self.candidates[0].target
        (self.workload,) = workloads.find(options.workload, self._first.count_tokens)[:1]
        self.plain: list[BenchCell] = []
        self.rounds = 0
        self._seconds = 0.0  # of the longest cell so far

    def measure(self) -> None:
        """Runs rounds of all candidates that are still in, with plain decoding in each, in alternating order."""
        self._screen()
        while self.rounds < MAX_ROUNDS and self._fits():
            for load in [RequestLoad(concurrency=count) for count in self.options.concurrency]:
                self._round(load)
            self.rounds += 1
            if self.rounds * len(self.options.concurrency) >= MIN_PAIRS and self._decided():
                return

    def _screen(self) -> None:
        """Keeps as many of the first candidates as there is time for, by one round of plain decoding."""
        begun = time.monotonic()
        warm_up(self._first, self.workload, OFF)
        for count in self.options.concurrency:
            self._progress(0, 1, "how long does it take")
            self._timed(self._first, OFF, RequestLoad(concurrency=count))
        round_s, now = time.monotonic() - begun, time.monotonic()
        rounds = math.ceil(MIN_PAIRS / len(self.options.concurrency))
        self.candidates = self.candidates[: max(int((self._deadline - now) / (rounds * round_s)) - 1, 1)]

    def _timed(self, target: InProcessTarget, mode: str, load: RequestLoad) -> BenchCell:
        begun = time.monotonic()
        cell = measure(target, self.workload, mode, load, repeat=self.rounds)
        self._seconds = max(self._seconds, time.monotonic() - begun)
        return cell

    def _fits(self) -> bool:
        return time.monotonic() + self._seconds < self._deadline

    def _round(self, load: RequestLoad) -> None:
        running = [None, *(each for each in self.candidates if not each.is_out)]
        for number, candidate in enumerate(running if self.rounds % 2 == 0 else running[::-1]):
            if not self._fits():
                return
            text = f"round {self.rounds + 1}: {candidate.name if candidate else OFF}"
            self._progress(self.rounds * len(running) + number, MAX_ROUNDS * len(running), text)
            target, mode = (candidate.target, str(candidate.depth)) if candidate else (self._first, OFF)
            if candidate and not candidate.is_warm:
                warm_up(target, self.workload, mode)
                candidate.is_warm = True
            (candidate.cells if candidate else self.plain).append(self._timed(target, mode, load))

    def _decided(self) -> bool:
        gains = {each.name: each.gain(self.plain) for each in self.candidates if not each.is_out}
        points = {name: gain for name, gain in gains.items() if gain and gain.low is not None}
        best = max(points.values(), key=lambda gain: gain.point, default=None)
        if best is None or best.low is None:
            return False
        for each in self.candidates:
            gain = points.get(each.name)
            if gain and gain.high is not None and gain.high < best.low and gain.point < (1 - CLEAR) * best.point:
                each.is_out = True
        return sum(not each.is_out for each in self.candidates) == 1

    def _best(self) -> tuple[Candidate, Interval] | None:
        """Returns the best; of those within CLEAR of it one with depth auto, which also adapts to other loads."""
        gains = [(each, gain) for each in self.candidates if not each.is_out and (gain := each.gain(self.plain))]
        top = max((gain.point for _, gain in gains), default=0.0)
        close = [(each, gain) for each, gain in gains if gain.point >= (1 - CLEAR) * top]
        return max(close, key=lambda pair: (pair[0].depth == AUTO, pair[1].point), default=None)

    def setting(self) -> TunedSetting | None:
        """Returns the best, or plain decoding where that is clearly faster; None where too little is known."""
        if (best := self._best()) is None:
            return None
        each, gain = best
        low, high = gain.low, gain.high
        if low is None or high is None or gain.pairs < MIN_PAIRS:
            return None
        pays = gain.point >= 1 + CLEAR and low >= 1 - CLEAR
        if not pays and high >= 1:
            return None
        return TunedSetting(
            drafter=each.drafter if pays else "none",
            depth=each.depth if pays else 0,
            workload=self.workload.name,
            concurrency=self.options.concurrency,
            speedup=(gain.point, low, high),
        )

    def undecided(self) -> list[str]:
        best = self._best()
        seen = f"{best[0].name} has {best[1]}, pairs: {best[1].pairs}" if best else "nothing was measured"
        more = "on a quieter machine" if best and best[1].pairs >= MIN_PAIRS else "with more --minutes"
        return [
            f"nothing decided: {seen}; a verdict needs {MIN_PAIRS}, and an interval on one side of 1",
            f"nothing is kept, depth auto goes on deciding step by step; tune again {more}",
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Plain decoding first, then the candidates, the best before the others."""

        def row(drafter: str, depth: Depth, gain: tuple[Any, ...], acceptance_length: float) -> dict[str, Any]:
            names = ("speedup", "low", "high", "pairs")
            return {"drafter": drafter, "depth": depth, **dict(zip(names, gain, strict=True)),
                    "acceptance_length": acceptance_length}  # fmt: skip

        rows = []
        for each in self.candidates:
            gain = each.gain(self.plain)
            lengths = [cell.speculation.acceptance_length for cell in each.cells if cell.speculation]
            counts = astuple(gain) if gain else (None, None, None, 0)
            rows.append(row(each.drafter, each.depth, counts, mean(lengths) if lengths else 1.0))
        rows.sort(key=lambda row: -(row["speedup"] or 0))
        return [row("none", 0, (1.0, None, None, self.rounds), 1.0), *rows]


def _targets(model: Model, config: EngineConfig) -> list[tuple[str, InProcessTarget]]:
    """An engine for each drafter of the model: its head with lookup, other heads that come with it, lookup alone."""
    if config.drafter == "none":
        raise UsageError("--drafter none leaves nothing to tune", "leave it out")
    ways = [(config.drafter, model)]
    if config.drafter == AUTO:
        others = [] if config.head else other_heads(model).items()
        ways = [*([("mixed", model)] if model.head else []), *others, ("ngram", model)]
    blocks: int | None = config.kv_blocks
    targets = []
    for drafter, headed in ways:
        target = InProcessTarget(headed, replace(config, drafter=drafter, kv_blocks=blocks))
        blocks = target.kv_blocks
        targets.append((drafter, target))
    return targets
