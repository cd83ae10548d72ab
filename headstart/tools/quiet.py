"""Is this machine ours alone? What is measured while other programs use its processor is not kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MOST_WAITING = 0.05
"""Share of its threads' time that a measurement may wait for the processor and still count."""
TASKS = Path("/proc/self/task")


@dataclass
class Quiet:
    """`waiting`: share of the time of one thread that this process's threads were ready and others ran; None where the
    system does not tell (then nothing speaks against a measurement)."""

    waiting: float | None = None

    @property
    def disturbed(self) -> bool:
        return self.waiting is not None and self.waiting > MOST_WAITING

    @property
    def said(self) -> str:
        return f"other programs used the processor: {self.waiting or 0:.0%} of the time was spent waiting for it"


@contextmanager
def watched(threads: int) -> Iterator[Quiet]:
    """Look while something is measured on so many threads; the answer is there when the context ends."""
    found, start, before = Quiet(), time.perf_counter(), _waited()
    yield found
    after, seconds = _waited(), time.perf_counter() - start
    if after and seconds:
        waited = sum(each - before.get(task, 0.0) for task, each in after.items())
        found.waiting = waited / seconds / max(threads, 1)


def _waited() -> dict[str, float]:
    """Seconds that each thread has been ready to run without running; empty where the system does not tell."""
    waited = {}
    try:
        for task in TASKS.iterdir():
            waited[task.name] = int((task / "schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return {}
    return waited
