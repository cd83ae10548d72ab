"""Machine and versions of a run, and the CPU time of other processes during it.

Other load distorts even ratios: an engine whose threads spin at barriers loses far more than its share.
"""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import headstart

TOO_MUCH = 0.05
"""Cores used by other processes above which a section is invalid."""

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


LOCK = Path(tempfile.gettempdir()) / f"headstart-benchmark-{os.getuid()}.lock"
"""Lock file of a running benchmark; background training is paused meanwhile."""


@contextmanager
def machine_alone() -> Iterator[None]:
    """Context that waits for other benchmarks of this machine and pauses background training."""
    with LOCK.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def is_benchmark_running() -> bool:
    with LOCK.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@dataclass(frozen=True)
class Load:
    """CPU and wall seconds at one time."""

    wall_s: float
    own_s: float
    all_s: float  # of all cores, including time stolen by the hypervisor

    def others_since(self, before: Load) -> dict[str, float]:
        """Wall seconds, and CPU seconds of other processes, since `before`."""
        others = (self.all_s - before.all_s) - (self.own_s - before.own_s)
        return {"wall_s": self.wall_s - before.wall_s, "others_cpu_s": others}


def load_now() -> Load:
    """Current load from /proc/stat and the CPU time of this process and its children."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(each.ru_utime + each.ru_stime for each in usage) + _descendants_s()
    return Load(time.perf_counter(), own, (user + nice + system + irq + softirq + steal) * _TICK_S)


def _descendants_s() -> float:
    """CPU seconds of live process groups led by children."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            parent, group, seconds = int(fields[1]), int(fields[2]), (int(fields[11]) + int(fields[12])) * _TICK_S
            found.append((int(folder.name), parent, group, seconds))
    groups = {pid for pid, parent, _, _ in found if parent == os.getpid()}
    return sum(seconds for _, _, group, seconds in found if group in groups)


def others(records: Sequence[Mapping[str, Any]]) -> float:
    """Mean number of cores used by other processes during these turns."""
    wall = sum(record["wall_s"] for record in records)
    return sum(record["others_cpu_s"] for record in records) / wall if wall else 0.0


def verdict(cores: float) -> str:
    """Line under a table about the load of other processes."""
    text = f"Other processes used {max(cores, 0):.2f} cores during the turns."
    return text if cores <= TOO_MUCH else f"**NOT VALID, the machine was busy:** {text}"


def provenance(threads: int) -> dict[str, Any]:
    """Command, time, machine and versions of this run."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return {
        "command": shlex.join(sys.argv),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": cpu.partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "threads": threads,
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "headstart": headstart.__version__,
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
    }
