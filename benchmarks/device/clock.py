"""A clock that stops in time, and results that are written as they come."""

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
"""Left for the last files."""


@dataclass
class Clock:
    """So many minutes from now on; none: no end."""

    minutes: float | None = None
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds, without the reserve."""
        if self.minutes is None:
            return float("inf")
        return self.begun + 60 * self.minutes - RESERVE_S - time.monotonic()

    def share(self, part: float) -> Clock:
        """A clock for a part of what is left."""
        return Clock(None if self.minutes is None else max(0.0, part * self.left + RESERVE_S) / 60)


@dataclass
class Results:
    """A JSON file that grows by a row with every number; tables are printed as they come. `kept`: a copy that stays
    where this machine keeps its state, as `path` may be taken away after each call; `known`: rows that another call
    brought back, for a machine that has neither."""

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
        """Is there such a row without an error already?"""
        wanted = {"part": part, **keys}
        return any(all(row.get(k) == v for k, v in wanted.items()) and "error" not in row for row in self.rows)


def attempt(results: Results, part: str, work: Callable[[], None], **about: Any) -> bool:
    """One failing part never stops the others: its error becomes a row."""
    try:
        work()
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it is, the next part has its turn
        traceback.print_exc()
        results.add(part, **about, error=f"{type(error).__name__}: {error}"[:2000])
        return False
    return True


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Markdown on stdout."""
    print("\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        cells = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row)
        print("| " + " | ".join(cells) + " |")
    sys.stdout.flush()
