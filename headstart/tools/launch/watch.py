"""What was launched, watched: one server that is gone ends the command; one of several is started again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headstart.errors import CheckFailed
from headstart.tools.launch.start import Part, Running

POLL_S = 0.5
HEALTH_S = 5.0
SILENT = 3
"""So many looks without an answer: a process is there, but what it serves with is not."""
RESTARTS, WITHIN_S = 3, 600.0
"""A server that ends more often than that in such a time will not stay."""
Say = Callable[[str], None]


@dataclass
class Watch:
    """`silent`: looks in a row that a part has not answered. A part that was started again counts when it has answered
    once."""

    running: Running
    say: Say
    silent: dict[str, int] = field(default_factory=dict)
    loading: set[str] = field(default_factory=set)

    def forever(self) -> None:
        """Until they are ended on purpose. Raises CheckFailed when one that is alone is gone, or another often."""
        looked = time.monotonic()
        while not self.running.over:
            time.sleep(POLL_S)
            for part in self.running.parts:
                if (how := part.ended()) and not self.running.over:
                    self.gone(part, how)
            if time.monotonic() - looked >= HEALTH_S:
                looked = time.monotonic()
                for part in self.running.parts:
                    self.look(part)

    def look(self, part: Part) -> None:
        """Does it answer?"""
        if part.answers():
            if part.name in self.loading:
                self.loading.discard(part.name)
                self.say(f"{part.name} answers again after {time.monotonic() - part.starts[-1]:.0f} s")
            self.silent[part.name] = 0
            return
        if part.name in self.loading:
            return
        self.silent[part.name] = self.silent.get(part.name, 0) + 1
        if self.silent[part.name] >= SILENT:
            self.gone(part, f"does not answer {part.health} any more")

    def gone(self, part: Part, how: str) -> None:
        """Start one of several again. Raises CheckFailed for one that is alone, or does not stay."""
        part.end()  # its workers may be left
        if len(self.running.parts) == 1:
            raise part.failed(f"{part.name} {how}", CheckFailed)
        recent = [when for when in part.starts[1:] if time.monotonic() - when < WITHIN_S]
        if len(recent) >= RESTARTS:
            what = f"{part.name} {how}, and was started again {len(recent)} times in the last {WITHIN_S:.0f} s"
            raise part.failed(what, CheckFailed)
        self.say(f"{part.name} {how}: {part.reason()}; starting it again ({len(recent) + 1} of {RESTARTS})")
        part.start()
        self.loading.add(part.name)
        self.silent[part.name] = 0
