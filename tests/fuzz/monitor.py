"""Beside the fuzzers, in a process of its own: how fast /health and a well-behaved neighbour are answered, and memory.

What the machine itself adds (others use its cores) is measured by sleeping: `late` is how much longer a nap took.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.fuzz.client import send

NEIGHBOUR: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0.8, "seed": 7}
SLOW_HEALTH, SLOW_NEIGHBOUR = 0.2, 5.0
HEALTH_EVERY, NEIGHBOUR_EVERY, MEMORY_EVERY = 0.05, 0.5, 0.5


@dataclass
class Found:
    """Seconds of each look; megabytes."""

    health: list[float] = field(default_factory=list)
    neighbour: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    resident_mb: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    neighbour_busy: int = 0
    slow: list[tuple[str, float, float]] = field(default_factory=list)  # what, its seconds, when it ended


def resident_mb(pid: int) -> float:
    """Of a process and its children."""
    total = _resident(pid)
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            total += sum(_resident(int(child)) for child in task.read_text().split())
        except OSError:
            continue
    return total


def _resident(pid: int) -> float:
    try:
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0.0
    return int(found[1]) / 1000 if found else 0.0


def watch(url: str, pid: int, pipe: Connection) -> None:
    """Until something comes through the pipe; then what was found goes back, as a dictionary."""
    found, ended = Found(), threading.Event()
    first: list[bytes] = []

    def health() -> None:
        answer = send(url, "/health", b"", 60, "GET")
        found.health.append(answer.seconds)
        if answer.seconds > SLOW_HEALTH:
            found.slow.append(("health", answer.seconds, time.monotonic()))
        if answer.status != 200:
            found.wrong.append(f"/health: {answer.status} {answer.body[:200]!r}")

    def neighbour() -> None:
        _ask_as_neighbour(found, url, first)

    def memory() -> None:
        found.resident_mb.append(resident_mb(pid))
        begun = time.monotonic()
        time.sleep(0.01)
        found.late.append(time.monotonic() - begun - 0.01)

    looks = ((health, HEALTH_EVERY), (neighbour, NEIGHBOUR_EVERY), (memory, MEMORY_EVERY))
    threads = [threading.Thread(target=_again, args=(look, every, ended)) for look, every in looks]
    for thread in threads:
        thread.start()
    pipe.recv()
    ended.set()
    for thread in threads:
        thread.join()
    pipe.send(asdict(found))


def _ask_as_neighbour(found: Found, url: str, first: list[bytes]) -> None:
    """The same request again and again; `first`: what it was answered at first."""
    answer = send(url, "/v1/completions", NEIGHBOUR, 120)
    found.neighbour.append(answer.seconds)
    if answer.seconds > SLOW_NEIGHBOUR:
        found.slow.append(("neighbour", answer.seconds, time.monotonic()))
    if answer.status in (429, 503, 504):
        found.neighbour_busy += 1
    elif answer.status != 200:
        found.wrong.append(f"neighbour: {answer.status} {answer.body[:200]!r}")
    else:
        text = json.dumps(json.loads(answer.body)["choices"]).encode()
        first[:] = first or [text]
        if text != first[0]:
            found.wrong.append(f"neighbour's text: {text!r}, was {first[0]!r}")


def _again(look: Callable[[], None], every: float, ended: threading.Event) -> None:
    while not ended.wait(every):
        look()


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds (median, 99 %, worst) and megabytes (first, most, last)."""
    memory = found["resident_mb"] or [0.0]
    return {
        **{f"{name}_ms": _spread(found[name]) for name in ("health", "neighbour", "late")},
        "looks": {name: len(found[name]) for name in ("health", "neighbour")},
        "neighbour_busy": found["neighbour_busy"],
        "resident_mb": [round(each) for each in (memory[0], max(memory), memory[-1])],
        "wrong": found["wrong"][:20],
        "num_wrong": len(found["wrong"]),
    }


def _spread(seconds: list[float]) -> list[float]:
    ordered = sorted(seconds) or [0.0]
    return [round(1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 1) for share in (0.5, 0.99, 1.0)]
