"""A group of replicas: their parts of the machine, and the file by which they know each other."""

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from headstart.errors import UsageError
from headstart.files import write_atomic
from headstart.machine import ROOT, Node, cores

FILE = "replicas.json"
NUMA = "numa"
MEMORY_SHARE = 0.5  # part of the free memory, before the first replica starts, for the caches of all
ReplicaState = Literal["starting", "ready", "leaving", "down"]


@dataclass(frozen=True, kw_only=True)
class ReplicaInfo:
    """One replica."""

    number: int
    url: str
    pid: int
    state: ReplicaState
    starts: int  # how often it was started
    since: float  # Unix time of the last start
    cpus: tuple[int, ...]  # that it is bound to; none: any


@dataclass(frozen=True, kw_only=True)
class ReplicaGroup:
    """All replicas of a server, as their supervisor writes them into a file."""

    cache_bytes: int  # bytes for the caches of one replica
    router: str  # URL of the router's metrics
    relay: str  # URL of the relay
    token: str  # with which replicas read each other's metrics
    replicas: tuple[ReplicaInfo, ...] = ()

    def write(self, folder: Path) -> None:
        """Write the group into its file."""
        write_atomic(folder / FILE, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "ReplicaGroup":
        """Read the group from its file. Raises OSError or ValueError."""
        document: dict[str, Any] = json.loads((folder / FILE).read_text("utf-8"))
        known = tuple(ReplicaInfo(**each | {"cpus": tuple(each["cpus"])}) for each in document.pop("replicas"))
        return cls(**document, replicas=known)


@dataclass(frozen=True)
class ReplicaId:
    """A replica: the folder of its group, and its number."""

    folder: Path  # of the group's file
    number: int
    token: str = field(default="", repr=False, compare=False)

    @classmethod
    def of(cls, text: str) -> "ReplicaId":
        """Reads FOLDER:NUMBER, the supervisor's argument. Raises UsageError."""
        folder, _, number = text.rpartition(":")
        if not folder or not number.isdecimal() or not (Path(folder) / FILE).is_file():
            raise UsageError(f"--replica is {text!r}", "it is for processes that --replicas starts: use that")
        return cls(Path(folder), int(number), ReplicaGroup.read(Path(folder)).token)

    def __str__(self) -> str:
        return f"{self.folder}:{self.number}"

    @property
    def process(self) -> str:
        """Name of the process in log lines."""
        return f"replica {self.number}"

    def group(self) -> ReplicaGroup:
        return ReplicaGroup.read(self.folder)


@dataclass(frozen=True)
class CpuShare:
    """The processors of a replica."""

    cpus: tuple[int, ...]  # that it is bound to; none: any
    threads: int


def divide_cpus(
    wanted: str, threads: int | None, nodes: Seq[Node], quota: float | None, root: Path = ROOT
) -> tuple[CpuShare, ...]:
    """The shares of `wanted` replicas: a number, or `numa` for one on each memory node. `threads`: of each replica, if
    set. `quota`: CPUs that the cgroup allows. Raises UsageError for more than there are cores."""
    cpus = [cpu for core in cores(nodes, root) for cpu in core]
    most = len(cpus) if quota is None else max(1, min(len(cpus), int(quota)))
    if wanted != NUMA and not wanted.isdecimal():
        raise UsageError(f"--replicas is {wanted!r}, which is no number", f"a number, or {NUMA}: one on each node")
    count = len(nodes) if wanted == NUMA else int(wanted)
    if not 1 <= count <= most:
        raise UsageError(f"--replicas is {count}, but must be between 1 and {most}, the cores of this process")
    if threads is not None and threads * count > most:
        what = f"--replicas {count} of --threads {threads} need {threads * count} cores, but this process has {most}"
        raise UsageError(what, f"--threads {most // count} or less: they are those of each replica")
    bounds = [place * len(cpus) // count for place in range(count + 1)]
    if wanted == NUMA:
        sizes = [len(node.cpus) for node in nodes]
        bounds = [sum(sizes[:place]) for place in range(count + 1)]
    parts = [tuple(cpus[first:last]) for first, last in pairwise(bounds)]
    if quota is not None and quota < len(cpus):  # other processes use these cores, too
        return tuple(CpuShare((), threads or most // count) for _ in parts)
    return tuple(CpuShare(part, threads or len(part)) for part in parts)
