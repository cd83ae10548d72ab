"""The level of a budget on which all replicas of a server draw: a file of two numbers, changed under a lock."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headstart.system import alone

_ENTRY = struct.Struct("<dd")
"""The level, and when it was that, by the clock that all processes of a machine share."""


@dataclass(frozen=True)
class Ledger:
    """A file, which need not be there yet."""

    path: Path

    def change(self, full: float, by: Callable[[float, float], float]) -> float:
        """The level becomes what `by` makes of it and of the seconds since; the new level. `full`: the first one."""
        with self.path.open("a+b", buffering=0) as file, alone(file.fileno()):
            file.seek(0)
            found, now = file.read(_ENTRY.size), time.monotonic()
            level, then = _ENTRY.unpack(found) if len(found) == _ENTRY.size else (full, now)
            level = by(level, now - then)
            file.truncate(0)  # what is written goes to the end
            file.write(_ENTRY.pack(level, now))
            return level
