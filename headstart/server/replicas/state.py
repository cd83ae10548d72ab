"""What the replicas of a server know of each other: a folder with one document, which their supervisor writes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from headstart.errors import UsageError
from headstart.files import write_whole

NAME = "replicas.json"
State = Literal["starting", "ready", "leaving", "down"]


@dataclass(frozen=True, kw_only=True)
class Known:
    """One replica. `starts`: how often it was started; `since`: Unix time of the last."""

    number: int
    url: str
    pid: int
    state: State
    starts: int
    since: float
    cpus: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All of them. `room`: bytes that the caches of one may take; `router`: where its metrics are; `token`: by which
    they ask each other, since the router passes no API key."""

    room: int
    router: str
    token: str
    replicas: tuple[Known, ...] = ()

    def write(self, folder: Path) -> None:
        write_whole(folder / NAME, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Fleet:
        """Raises OSError or ValueError."""
        document: dict[str, Any] = json.loads((folder / NAME).read_text("utf-8"))
        known = tuple(Known(**each | {"cpus": tuple(each["cpus"])}) for each in document.pop("replicas"))
        return cls(**document, replicas=known)


@dataclass(frozen=True)
class Member:
    """Which replica this process is. `token`: that of the fleet."""

    folder: Path
    number: int
    token: str = field(default="", repr=False, compare=False)

    @classmethod
    def of(cls, text: str) -> Member:
        """FOLDER:NUMBER, as a supervisor gives it. Raises UsageError."""
        folder, _, number = text.rpartition(":")
        if not folder or not number.isdecimal() or not (Path(folder) / NAME).is_file():
            raise UsageError(f"--replica is {text!r}", "it is for processes that --replicas starts: use that")
        return cls(Path(folder), int(number), Fleet.read(Path(folder)).token)

    def __str__(self) -> str:
        return f"{self.folder}:{self.number}"

    def fleet(self) -> Fleet:
        return Fleet.read(self.folder)
