"""The measuring core: one run of a workload, under one load, in one mode, against anything that is a System."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from headstart.tools.bench.document import Cell, Distribution, DraftCounts, Latency
from headstart.tools.bench.energy import EnergyMeter
from headstart.tools.bench.workloads import Task, Workload

OFF, AUTO, SERVER = "off", "auto", "server"
FEWEST_REQUESTS = 8
ERRORS_SHOWN = 3
Notify = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Load:
    """How tasks come: `concurrency` clients, each beginning the next task as soon as its last has ended; or, where
    that is None, one after another at random (Poisson) times, `rate` per second, whatever still runs."""

    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0

    def arrivals(self, count: int) -> Iterator[float]:
        """Seconds from the start at which tasks are due."""
        rng, now = random.Random(self.seed), 0.0
        for _ in range(count):
            yield now
            if self.rate is not None:
                now += rng.expovariate(self.rate)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer. Times in seconds: `ttft_s` and `seconds` (to the last token) count from when it was sent or due;
    `gaps_s` are between deliveries. `error`: why there is none, or only a part."""

    prompt_tokens: int = 0
    cached_tokens: int | None = None
    output_tokens: int = 0
    ttft_s: float = 0.0
    seconds: float = 0.0
    gaps_s: tuple[float, ...] = ()
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        return (self.seconds - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run gave. `lost`: why the connection to what is measured broke; then nothing more was sent."""

    samples: list[Sample]
    seconds: float
    speculation: DraftCounts | None
    lost: str = ""


class System(Protocol):
    """What is measured: engines of this process, or a server."""

    chunked_prefill: bool | None
    is_local: bool
    """Is it this machine that works?"""

    @property
    def about(self) -> Mapping[str, Any]:
        """Model, backend, server: what a report says was measured."""

    @property
    def modes(self) -> tuple[str, ...]:
        """What to measure when the user names no modes."""

    def is_alive(self) -> bool:
        """After failures: does it make sense to go on?"""

    def count_tokens(self, text: str) -> int: ...

    def check(self, tasks: Seq[Task]) -> None:
        """Raises CapacityError or UsageError for tasks that cannot be done, where that can be told beforehand."""

    def settle(self, tasks: Seq[Task], mode: str) -> None:
        """Make what is cached at the start of a run the same for every mode. Raises UsageError for a mode that it does
        not have."""

    def run(self, tasks: Seq[Task], mode: str, load: Load, notify: Notify) -> Outcome:
        """Do all tasks; `notify` is called after each answer. Failed answers are samples with an error."""


def requests_for(concurrency: int | None) -> int:
    """Tasks of a run when the user names no number: every client has two."""
    return max(FEWEST_REQUESTS, 2 * (concurrency or 0))


def warm_up(runner: System, workload: Workload, mode: str) -> None:
    """A short run that counts for nothing: first calls pay for allocations."""
    tasks = workload.limited(4).tasks(2)
    runner.settle(tasks, mode)
    runner.run(tasks, mode, Load(concurrency=2), lambda: None)


def measure(
    runner: System,
    workload: Workload,
    mode: str,
    load: Load,
    *,
    num_requests: int | None = None,
    repeat: int = 0,
    meter: EnergyMeter | None = None,
    notify: Notify = lambda: None,
) -> Cell:
    """One run. Tasks, their seeds and their arrivals depend on `load.seed` only, so that all modes and repeats get the
    same ones. Raises UsageError for a mode that the runner does not have, CapacityError for tasks that do not fit the
    model's context."""
    tasks = workload.tasks(num_requests or requests_for(load.concurrency), load.seed)
    runner.settle(tasks, mode)
    with meter or nullcontext():
        outcome = runner.run(tasks, mode, load, notify)
    done = [sample for sample in outcome.samples if not sample.error]
    errors = Counter(sample.error for sample in outcome.samples if sample.error)
    cached = [sample.cached_tokens for sample in done if sample.cached_tokens is not None]
    return Cell(
        workload=workload.name,
        mode=mode,
        concurrency=load.concurrency,
        rate=load.rate,
        chunked_prefill=runner.chunked_prefill,
        repeat=repeat,
        complete=not outcome.lost and bool(done),
        requests=len(outcome.samples),
        failed=errors.total(),
        errors=tuple(error for error, _ in errors.most_common(ERRORS_SHOWN)),
        seconds=outcome.seconds,
        prompt_tokens=sum(sample.prompt_tokens for sample in done),
        cached_tokens=sum(cached) if done and len(cached) == len(done) else None,
        output_tokens=sum(sample.output_tokens for sample in done),
        latency=latency(done),
        speculation=outcome.speculation,
        joules=meter.joules if meter and runner.is_local else None,
    )


def latency(samples: Seq[Sample]) -> Latency:
    """Of answers that were given. An answer without a token has no time to its first one."""
    spoken = [sample for sample in samples if sample.output_tokens]
    return Latency(
        ttft=Distribution.of(sample.ttft_s for sample in spoken),
        tpot=Distribution.of(each for sample in spoken if (each := sample.tpot_s) is not None),
        itl=Distribution.of(gap for sample in spoken for gap in sample.gaps_s),
        e2e=Distribution.of(sample.seconds for sample in spoken),
    )
