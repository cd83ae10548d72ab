"""What the endpoints of one server share."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.server.bridge import Bridge
from headstart.server.prepare import Formats


@dataclass(frozen=True)
class State:
    """`names`: by which requests may call the model; the first signs the answers. `started`: Unix time."""

    bridge: Bridge
    names: tuple[str, ...]
    formats: Formats
    started: int
    request_timeout: float | None

    @property
    def name(self) -> str:
        return self.names[0]
