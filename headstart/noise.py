"""Check of measurements for disturbance by other processes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MAX_WAITING = 0.05  # largest share of thread time that a valid measurement may wait for the processor
TASKS = Path("/proc/self/task")


@dataclass
class NoiseCheck:
    waiting: float | None = None
    """Share of a thread's time in which the threads of this process waited for a processor; None: unknown."""

    @property
    def is_disturbed(self) -> bool:
        return self.waiting is not None and self.waiting > MAX_WAITING

    @property
    def reason(self) -> str:
        return f"other programs used the processor: {self.waiting or 0:.0%} of the time was spent waiting for it"


@contextmanager
def check_noise(num_threads: int) -> Iterator[NoiseCheck]:
    """Yields a NoiseCheck, which is filled in when the context ends."""
    check, start, before = NoiseCheck(), time.perf_counter(), _waiting_seconds()
    yield check
    after, seconds = _waiting_seconds(), time.perf_counter() - start
    if after and seconds:
        waited = sum(each - before.get(task, 0.0) for task, each in after.items())
        check.waiting = waited / seconds / max(num_threads, 1)


def _waiting_seconds() -> dict[str, float]:
    """Returns for each thread the seconds in which it was ready but not running; empty if the system has no count."""
    try:
        return {task.name: int((task / "schedstat").read_text().split()[1]) * 1e-9 for task in TASKS.iterdir()}
    except (OSError, ValueError, IndexError):
        return {}
