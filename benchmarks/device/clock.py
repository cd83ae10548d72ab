"""Time limit of a call, and results that are written as they are measured."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headstart.files import write_atomic

RESERVE_S = 20.0
"""Seconds reserved for writing the last files."""


@dataclass
class Clock:
    """A limit of `minutes` from now on (None: no limit)."""

    minutes: float | None = None
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds left, less the reserve."""
        if self.minutes is None:
            return float("inf")
        return self.begun + 60 * self.minutes - RESERVE_S - time.monotonic()

    def share(self, part: float) -> Clock:
        """A clock with a share of the remaining time."""
        return Clock(None if self.minutes is None else max(0.0, part * self.left + RESERVE_S) / 60)


@dataclass
class Results:
    """Rows in a JSON file, written one by one. `kept`: a copy beside the machine's state, as `path` may be removed
    after each call. `known`: returned rows of an earlier call, for a machine without both."""

    path: Path
    about: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    kept: Path | None = None
    known: Path | None = None

    def __post_init__(self) -> None:
        found = [each for each in (self.path, self.kept, self.known) if each and each.exists()]
        if found:
            self.rows = json.loads(found[0].read_text("utf-8"))["rows"]

    def add(self, part: str, **row: Any) -> None:
        self.rows.append({"part": part, **row})
        for path in filter(None, (self.path, self.kept)):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps({"about": self.about, "rows": self.rows}, indent=1, default=str) + "\n")

    def done(self, part: str, **keys: Any) -> bool:
        """Whether a row with these keys exists without an error."""
        wanted = {"part": part, **keys}
        return any(all(row.get(k) == v for k, v in wanted.items()) and "error" not in row for row in self.rows)


def attempt(results: Results, part: str, work: Callable[[], None], **about: Any) -> bool:
    """Runs a part. Its error becomes a row and does not stop the others."""
    try:
        work()
    except (Exception, SystemExit) as error:  # noqa: BLE001  no error stops the next part
        traceback.print_exc()
        results.add(part, **about, error=f"{type(error).__name__}: {error}"[:2000])
        return False
    return True


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a Markdown table."""
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        cells = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row)
        print("| " + " | ".join(cells) + " |")
    sys.stdout.flush()
