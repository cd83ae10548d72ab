"""`headstart tune`: finds the fastest drafter and depth for a model and workload, on this machine or at a server."""

import asyncio
import math
import shlex
import subprocess
import time
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from statistics import mean
from typing import Any

from headstart.config import AUTO, FIXED_DEPTH, Depth, EngineConfig
from headstart.core import Progress, Report, no_progress
from headstart.engine.load import Model, load_model, other_heads
from headstart.errors import UsageError
from headstart.system import stop_process_group
from headstart.tools import client
from headstart.tools.bench import workloads
from headstart.tools.bench.document import BenchCell, Interval
from headstart.tools.bench.http import HttpTarget
from headstart.tools.bench.inprocess import InProcessTarget
from headstart.tools.bench.measure import OFF, SERVER, BenchTarget, RequestLoad, measure, warm_up
from headstart.tools.bench.summary import speedup
from headstart.tools.options import TuneFlags
from headstart.tools.saved import TunedSetting, load_setting, save_setting
from headstart.tools.server_process import start_server
from headstart.wording import LEAVE_OUT

DEPTHS = (FIXED_DEPTH, 2, 1, 5)
MIN_PAIRS, MAX_ROUNDS = 6, 12  # pairs with plain decoding for a verdict; each round has a pair for every load
CLEAR = 0.01
"""Margin of decisions. A candidate is dropped if it is slower than the best by this share and the intervals do not
overlap. Drafting pays if its speed-up is at least 1 + CLEAR and the interval is above 1 - CLEAR. It does not pay if the
best candidate's interval is below 1. Otherwise no setting is saved: `auto` decides in each step."""


@dataclass(frozen=True, kw_only=True)
class TuneOptions(TuneFlags):
    config: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        if self.url is None and (self.start or self.start_off or self.api_key):
            raise UsageError("--start, --start-off and --api-key are for servers", "give --url too")
        if (self.start is None) != (self.start_off is None):
            raise UsageError("--start and --start-off belong together", "tune compares with plain decoding: give both")
        if self.start is not None and "{depth}" not in self.start:
            raise UsageError(f"--start is {self.start!r}, without {{depth}}", "write {depth} where the depth belongs")


@dataclass
class Candidate:
    drafter: str
    depth: Depth
    target: BenchTarget
    cells: list[BenchCell] = field(default_factory=list)  # all its measurements
    is_out: bool = False  # clearly slower than the best
    is_warm: bool = False

    @property
    def name(self) -> str:
        return f"{self.drafter} {self.depth}"

    def gain(self, plain: list[BenchCell]) -> Interval | None:
        """Returns the speed-up over plain decoding, with the pairs of all loads together."""
        return speedup(plain, self.cells)


def run(options: TuneOptions, progress: Progress = no_progress) -> Report:
    """Measures until one candidate is clearly the best or the time is over, and saves the setting if the result is
    significant. Without `retune`, only shows a saved setting. Raises UsageError for a model that cannot draft."""
    known = None if options.retune or options.url else load_setting(options.model, options.config)
    if known is not None and known.workload == options.workload:
        return Report(True, {"kept": True, "choice": vars(known)}, [f"tuned before: {known}", "again: --retune"])
    workloads.find(options.workload, len)  # errors come before a model is loaded
    tuning = TuningRun(options, progress)
    try:
        tuning.measure()
    finally:
        tuning.close()
    setting, rows = tuning.setting(), tuning.rows()
    data = {"kept": False, "choice": setting and vars(setting), "candidates": rows, "pairs": tuning.rounds}
    if setting is None:
        return Report(True, data | {"path": None}, tuning.undecided())
    if options.url:
        how = f"with depth {setting.depth}" if setting.pays else "without drafting"
        return Report(True, data | {"path": None}, [str(setting), f"start the server {how}"])
    path = save_setting(options.model, options.config, setting)
    return Report(True, data | {"path": str(path)}, [str(setting), f"kept in {path}; serve and launch use it"])


class TuningRun:
    def __init__(self, options: TuneOptions, progress: Progress) -> None:
        self.options, self._progress = options, progress
        self._deadline = time.monotonic() + 60 * options.minutes
        progress(0, 1, "loading")
        self.candidates = _at_server(options) if options.url else _in_process(options)
        self.candidates.sort(key=lambda each: each.depth != AUTO)  # the most promising ones come first
        self._first = self.candidates[0].target
        (self.workload,) = workloads.find(options.workload, self._first.count_tokens)[:1]
        self.plain: list[BenchCell] = []
        self.rounds = 0
        self._seconds = 0.0  # of the longest cell so far

    def close(self) -> None:
        """Ends the server that tune has started, if any."""
        if isinstance(self._first, StartedServer):
            self._first.close()

    def measure(self) -> None:
        """Runs rounds of all remaining candidates and plain decoding, in alternating order."""
        self._screen()
        while self.rounds < MAX_ROUNDS and self._fits():
            for load in [RequestLoad(concurrency=count) for count in self.options.concurrency]:
                self._round(load)
            self.rounds += 1
            if self.rounds * len(self.options.concurrency) >= MIN_PAIRS and self._decided():
                return

    def _screen(self) -> None:
        """Times one round of plain decoding and keeps as many of the first candidates as there is time for."""
        begun = time.monotonic()
        warm_up(self._first, self.workload, OFF)
        for count in self.options.concurrency:
            self._progress(0, 1, "how long does it take")
            self._timed(self._first, OFF, RequestLoad(concurrency=count))
        round_s, now = time.monotonic() - begun, time.monotonic()
        rounds = math.ceil(MIN_PAIRS / len(self.options.concurrency))
        self.candidates = self.candidates[: max(int((self._deadline - now) / (rounds * round_s)) - 1, 1)]

    def _timed(self, target: BenchTarget, mode: str, load: RequestLoad) -> BenchCell:
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
        """Returns the fastest candidate with its speed-up; prefers depth auto within CLEAR of the fastest, since auto
        adapts to other loads. None without measurements."""
        gains = [(each, gain) for each in self.candidates if not each.is_out and (gain := each.gain(self.plain))]
        top = max((gain.point for _, gain in gains), default=0.0)
        close = [(each, gain) for each, gain in gains if gain.point >= (1 - CLEAR) * top]
        return max(close, key=lambda pair: (pair[0].depth == AUTO, pair[1].point), default=None)

    def setting(self) -> TunedSetting | None:
        """Returns the best candidate, or plain decoding if that is clearly faster; None if the result is unclear."""
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
            drafter=each.drafter if pays else "none", depth=each.depth if pays else 0, workload=self.workload.name,
            concurrency=self.options.concurrency, speedup=(gain.point, low, high),
        )  # fmt: skip

    def undecided(self) -> list[str]:
        best = self._best()
        seen = f"{best[0].name} has {best[1]} of plain decoding in {best[1].pairs} pairs" if best else "nothing ran"
        more = "on a quieter machine" if best and best[1].pairs >= MIN_PAIRS else "with more --minutes"
        return [
            f"no decision: {seen}; a decision needs {MIN_PAIRS} pairs and a 95 % interval without 1",
            f"no setting is stored, and depth auto keeps choosing at each step; tune again {more}",
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Returns the JSON rows: plain decoding first, then the candidates by descending speed-up."""

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


def _in_process(options: TuneOptions) -> list[Candidate]:
    config = replace(options.config, depth=AUTO, max_num_seqs=max(options.config.max_num_seqs, *options.concurrency))
    return [
        Candidate(drafter, depth, target)
        for drafter, target in _targets(load_model(options.model, config), config)
        for depth in (AUTO, *DEPTHS)
        if depth == AUTO or depth <= target.max_depth
    ]


def _at_server(options: TuneOptions) -> list[Candidate]:
    """Returns candidates at a server: depths set by requests to a headstart server, or depths of any server that is
    restarted for each of them. Raises UsageError for another server without start commands."""
    assert options.url
    server = client.Server.at(options.url, options.api_key)
    if options.start and options.start_off:
        started = StartedServer(server, options.start, options.start_off, options.model)
        return [Candidate(SERVER, depth, started) for depth in DEPTHS]
    target = HttpTarget(server, model=options.model)
    if AUTO not in target.modes:
        hint = "give --start COMMAND with {depth} in it, and --start-off COMMAND without drafting"
        raise UsageError(f"{server} is not headstart's: its requests cannot set the depth", hint)
    return [Candidate(SERVER, depth, target) for depth in (AUTO, *DEPTHS)]


class StartedServer(HttpTarget):
    """A server that is restarted with another command for each mode. Raises UsageError if another server answers at
    its address, or if the command ends before the server answers."""

    def __init__(self, server: client.Server, command: str, off: str, model: str | None) -> None:
        self._commands, self._model = (command, off), model
        self._mode: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if self._answers(server):
            raise UsageError(f"a server answers at {server} already", "stop it: --start starts one for each depth")
        self._start(server, OFF)
        super().__init__(server, model=model)

    def close(self) -> None:
        if self._process is not None:
            stop_process_group(self._process)  # the command may have started processes of its own
            self._process = None

    def _server_of(self, mode: str) -> tuple[client.Server, dict[str, Any]]:
        self._start(self._server, mode)
        return super()._server_of(SERVER)

    def _start(self, server: client.Server, mode: str) -> None:
        if mode == self._mode:
            return
        self.close()
        command = self._commands[1] if mode == OFF else self._commands[0].replace("{depth}", mode)
        self._process = start_server(shlex.split(command), partial(self._answers, server))
        self._mode = mode

    def _answers(self, server: client.Server) -> bool:
        """Returns whether the server completes a text: some servers answer other paths while they load."""
        with suppress(UsageError, OSError, ValueError):
            name = client.find_model(server, self._model)["id"]
            body = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
            return asyncio.run(client.post(server, client.CHAT, body)).status == 200
        return False


def _targets(model: Model, config: EngineConfig) -> list[tuple[str, InProcessTarget]]:
    """Returns (drafter, engine) for each drafter of the model: its head with lookup, other shipped heads, lookup alone.
    Raises UsageError for --drafter none."""
    if config.drafter == "none":
        raise UsageError("--drafter none leaves nothing to tune", LEAVE_OUT)
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
