"""Measurement of one cell: a run of a workload under one load in one mode, and the energy it uses."""

import math
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, Self

from headstart.errors import UsageError
from headstart.tools.bench.document import BenchCell, Distribution, DraftCounts, Latency
from headstart.tools.bench.workloads import Task, Workload

OFF, AUTO, SERVER = "off", "auto", "server"
MIN_REQUESTS = 8
ALONE_TOKENS = 8  # of each answer of the task that estimates the time of a run
MAX_ERRORS_SHOWN = 3
Notify = Callable[[], None]


def check_mode(mode: str) -> None:
    """Raises UsageError unless `mode` is off, auto or a depth."""
    if mode not in (OFF, AUTO) and not mode.isdecimal():
        raise UsageError(f"--modes has {mode!r}, which is unknown", "modes are off, auto and depths such as 3")


@dataclass(frozen=True, kw_only=True)
class RequestLoad:
    """Arrival of tasks: either `concurrency` clients, each of which starts its next task when the last one ended, or
    Poisson arrivals at `rate` tasks per second. One of the two is None."""

    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0

    def arrivals(self, count: int) -> Iterator[float]:
        """Yields `count` due times in seconds from the start, ascending; all 0 with a fixed concurrency."""
        rng, now = random.Random(self.seed), 0.0
        for _ in range(count):
            yield now
            if self.rate is not None:
                now += rng.expovariate(self.rate)

    def __str__(self) -> str:
        return f"{self.concurrency} at a time" if self.rate is None else f"{self.rate:g} per second"


@dataclass(frozen=True, kw_only=True)
class AnswerSample:
    """Measurements of one answer. Times are in seconds since the request was sent, or due with Poisson arrivals."""

    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    ttft_s: float = 0.0
    seconds: float = 0.0  # to the last token
    gaps_s: tuple[float, ...] = ()  # between deliveries
    error: str = ""  # why the answer is missing or incomplete

    @property
    def tpot_s(self) -> float | None:
        return (self.seconds - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    samples: list[AnswerSample]
    seconds: float
    speculation: DraftCounts | None  # None: unknown
    lost: str = ""  # why the connection broke, which ended the run; empty: it did not


class BenchTarget(Protocol):
    """The engine or server that a bench measures."""

    chunked_prefill: bool | None  # None: the server decides
    is_local: bool  # runs on this machine, whose energy can be read

    @property
    def description(self) -> Mapping[str, Any]:
        """Model, backend and server, for the report."""

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes to measure when the user names none."""

    def is_alive(self) -> bool:
        """Returns whether the target still answers; asked after failed requests."""

    def count_tokens(self, text: str) -> int: ...

    def check(self, tasks: Seq[Task]) -> None:
        """Raises CapacityError or UsageError for tasks that cannot run, if the target can know that in advance."""

    def settle(self, tasks: Seq[Task], mode: str) -> None:
        """Brings caches into the same state for every mode, before a run. Raises UsageError for an unknown mode."""

    def run(self, tasks: Seq[Task], mode: str, load: RequestLoad, notify: Notify) -> RunOutcome:
        """Runs all tasks and calls `notify` after each answer. A failed answer is a sample with an error."""


def num_requests_for(concurrency: int | None) -> int:
    """Returns the default number of tasks in a run: two for each client, at least MIN_REQUESTS."""
    return max(MIN_REQUESTS, 2 * (concurrency or 0))


def warm_up(target: BenchTarget, workload: Workload, mode: str) -> None:
    """Runs two short tasks without measuring them, since first calls allocate memory."""
    tasks = workload.limited(4).tasks(2)
    target.settle(tasks, mode)
    target.run(tasks, mode, RequestLoad(concurrency=2), lambda: None)


@dataclass(frozen=True)
class TaskTime:
    """Times of one task that ran alone."""

    num_answers: int
    prefill_s: float  # to the first tokens of all answers
    tpot_s: float  # 0: no answer had two tokens

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.tpot_s if self.tpot_s else 0.0

    def estimate_seconds(self, num_tasks: int, max_tokens: int, concurrency: int) -> float:
        """Time of a run. Assumed: a batch of n answers decodes sqrt(n) times as many tokens per second as one."""
        decode_s = self.num_answers * max_tokens * self.tpot_s / math.sqrt(concurrency)
        return num_tasks * (self.prefill_s + decode_s)


def run_alone(target: BenchTarget, workload: Workload, mode: str) -> TaskTime:
    """Measures the workload's first task, with answers of at most ALONE_TOKENS."""
    tasks = workload.limited(ALONE_TOKENS).tasks(1)
    target.settle(tasks, mode)
    samples = target.run(tasks, mode, RequestLoad(concurrency=1), lambda: None).samples
    tpots = [each for sample in samples if (each := sample.tpot_s) is not None]
    return TaskTime(len(samples), sum(sample.ttft_s for sample in samples), fmean(tpots) if tpots else 0.0)


def measure(
    target: BenchTarget, workload: Workload, mode: str, load: RequestLoad, *, num_requests: int | None = None,
    repeat: int = 0, meter: "EnergyMeter | None" = None, notify: Notify = lambda: None,
) -> BenchCell:  # fmt: skip
    """Measures one cell. Tasks, their seeds and arrivals depend only on `load.seed`, so that they are the same in all
    modes and repeats. Raises UsageError for an unknown mode, CapacityError for tasks that do not fit the context."""
    tasks = workload.tasks(num_requests or num_requests_for(load.concurrency), load.seed)
    target.settle(tasks, mode)
    with meter or nullcontext():
        outcome = target.run(tasks, mode, load, notify)
    done = [sample for sample in outcome.samples if not sample.error]
    errors = Counter(sample.error for sample in outcome.samples if sample.error)
    cached = [sample.cached_tokens for sample in done if sample.cached_tokens is not None]
    return BenchCell(
        workload=workload.name, mode=mode, concurrency=load.concurrency, rate=load.rate,
        chunked_prefill=target.chunked_prefill, repeat=repeat, complete=not outcome.lost and bool(done),
        requests=len(outcome.samples), failed=errors.total(),
        errors=tuple(error for error, _ in errors.most_common(MAX_ERRORS_SHOWN)), seconds=outcome.seconds,
        prompt_tokens=sum(sample.prompt_tokens for sample in done),
        cached_tokens=sum(cached) if done and len(cached) == len(done) else None,
        output_tokens=sum(sample.output_tokens for sample in done), latency=_latency(done),
        speculation=outcome.speculation, joules=meter.joules if meter and target.is_local else None,
    )  # fmt: skip


def _latency(samples: Seq[AnswerSample]) -> Latency:
    """Returns the latencies of all answers with at least one token."""
    spoken = [sample for sample in samples if sample.output_tokens]
    return Latency(
        ttft=Distribution.of(sample.ttft_s for sample in spoken),
        tpot=Distribution.of(each for sample in spoken if (each := sample.tpot_s) is not None),
        itl=Distribution.of(gap for sample in spoken for gap in sample.gaps_s),
        e2e=Distribution.of(sample.seconds for sample in spoken),
    )


POWERCAP = Path("/sys/class/powercap")
GPU_MS = 100  # interval between readings of a GPU's power


class EnergyMeter:
    """Measures the energy of the whole machine within a `with` block; `joules` is set at its end. Reads processor
    packages from Linux's powercap counters and NVIDIA GPUs with nvidia-smi; None if neither can be read."""

    def __init__(self, powercap: Path = POWERCAP, gpu_program: str = "nvidia-smi") -> None:
        zones = (zone for zone in sorted(powercap.glob("intel-rapl:[0-9]*")) if zone.name.count(":") == 1)  # packages
        self._zones = [zone for zone in zones if _counter(zone / "energy_uj") is not None]  # often only root may read
        self._gpu = shutil.which(gpu_program)
        self.joules: float | None = None

    def __enter__(self) -> Self:
        self.joules = None
        self._before = [_counter(zone / "energy_uj") for zone in self._zones]
        self._power = _GpuPower(self._gpu) if self._gpu else None
        return self

    def __exit__(self, *error: object) -> None:
        gpu = self._power.stop() if self._power else None
        packages = [_joules_since(zone, before) for zone, before in zip(self._zones, self._before, strict=True)]
        known = [each for each in (*packages, gpu) if each is not None]
        self.joules = sum(known) if known else None


def _counter(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _joules_since(zone: Path, before: int | None) -> float | None:
    after = _counter(zone / "energy_uj")
    if after is None or before is None:
        return None
    if after < before:  # the counter wrapped around
        after += _counter(zone / "max_energy_range_uj") or 0
    return (after - before) / 1e6


class _GpuPower:
    """Energy of all GPUs: their power is read every GPU_MS and integrated over time."""

    def __init__(self, program: str) -> None:
        query = ["--query-gpu=index,power.draw", "--format=csv,noheader,nounits", f"--loop-ms={GPU_MS}"]
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by stop
        self._process = subprocess.Popen([program, *query], stdout=self._output, stderr=subprocess.DEVNULL)
        self._started = time.perf_counter()

    def stop(self) -> float | None:
        """Returns joules since the start; None if no GPU reports its power."""
        seconds = time.perf_counter() - self._started
        self._process.terminate()
        self._process.wait()
        readings: dict[str, list[float]] = {}
        with self._output as output:
            output.seek(0)
            for line in output:
                index, _, watts = line.partition(",")
                with suppress(ValueError):  # "[N/A]": this GPU does not report its power
                    readings.setdefault(index, []).append(float(watts))
        means = [sum(watts) / len(watts) for watts in readings.values() if watts]
        return seconds * sum(means) if means else None
