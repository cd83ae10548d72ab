"""Processor, threads and memory that this process may use, with the limits of containers (cgroups).

`root` is the folder with the system's files; tests pass folders of their own.
"""

import os
import platform
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart import system

ROOT = Path("/")
INSTRUCTION_SETS = (
    "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_vbmi", "amx_tile",
    "asimd", "asimddp", "i8mm", "sve",
)  # fmt: skip
UNKNOWN_MEMORY = 4 << 30  # free bytes that are assumed if the system does not report them


@dataclass(frozen=True)
class Cpu:
    """A processor, with its instruction sets that kernels use."""

    model: str
    instruction_sets: tuple[str, ...]


@dataclass(frozen=True)
class Threads:
    """CPUs of this machine and of this process."""

    cores: int  # of the machine
    affinity: int  # that this process may run on
    quota: float | None  # worth of the cgroup's CPU quota; None: no quota

    @property
    def usable(self) -> int:
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota)))


@dataclass(frozen=True)
class Node:
    """A NUMA node: a socket, or a part of one."""

    number: int
    caches: tuple[tuple[int, ...], ...]  # CPUs that this process may run on, grouped by last-level cache

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(cpu for cache in self.caches for cpu in cache)


@dataclass(frozen=True)
class Memory:
    """Memory in bytes."""

    total: int  # of the machine
    available: int  # to this process, without swapping
    limit: int | None  # of the cgroup or of the process (ulimit), below `total`; None: no limit

    @property
    def allowed(self) -> int:
        """Bytes that this process may have; 0 if unknown."""
        return self.limit or self.total


def cpu(root: Path = ROOT) -> Cpu:
    """The processor of this machine."""
    text = read(root / "proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    name = model.group(1) if model else platform.processor() or "unknown"
    return Cpu(name, tuple(each for each in INSTRUCTION_SETS if each in present))


def threads(root: Path = ROOT) -> Threads:
    """Numbers of CPUs: of the machine, of the affinity mask, of the cgroup quota."""
    cores = os.cpu_count() or 1
    affinity = len(system.cpus())
    return Threads(cores, affinity, min(_quotas(root), default=None))


def thread_count(wanted: int | None) -> int:
    """Threads of an engine: `wanted`, or as many as affinity and quota allow."""
    return wanted or threads().usable


def nodes(root: Path = ROOT, usable: Collection[int] | None = None) -> tuple[Node, ...]:
    """NUMA nodes with CPUs that this process may run on (or with `usable`); one node if the system reports none."""
    if usable is None:
        usable = system.cpus()
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda each: int(each.name[4:]))
    found = [(int(each.name[4:]), sorted(_numbers(read(each / "cpulist")) & set(usable))) for each in folders]
    found = [(number, cpus) for number, cpus in found if cpus] or [(0, sorted(usable))]
    return tuple(Node(number, _caches(root, cpus)) for number, cpus in found)


def cores(nodes: Sequence[Node], root: Path = ROOT) -> list[tuple[int, ...]]:
    """The CPUs of each core (hardware threads), in order of node and cache; one CPU each if the system reports none."""
    found: dict[tuple[int, ...], list[int]] = {}
    for cpu in (cpu for node in nodes for cpu in node.cpus):
        shared = _numbers(read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        found.setdefault(tuple(sorted(shared | {cpu})), []).append(cpu)
    return [tuple(each) for each in found.values()]


def memory(root: Path = ROOT) -> Memory:
    """Total, available and allowed memory of this process."""
    found = {
        name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", read(root / "proc/meminfo"), re.M)
    }
    total, available = found.get("MemTotal", 0), found.get("MemAvailable", UNKNOWN_MEMORY)
    every = [*_memory_limits(root), *system.memory_limits()]
    limits = [(limit, used) for limit, used in every if not total or limit < total]
    free = [max(limit - used, 0) for limit, used in limits]
    return Memory(total, min([available, *free]), min((limit for limit, _ in limits), default=None))


def identity() -> dict[str, Any]:
    """Facts that identify this machine in cached measurements."""
    return {"system": platform.uname()[:5], "cpu": cpu().model}


def read(path: Path) -> str:
    """Stripped text of a system file; empty if it does not exist."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _numbers(text: str) -> set[int]:
    """The numbers of a list such as 0-3,8."""
    ranges = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in text.split(",")]
    return {n for each in ranges if each for n in range(int(each[1]), int(each[2] or each[1]) + 1)}


def _caches(root: Path, cpus: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """CPUs grouped by last-level cache; one group if the system reports none."""
    found: dict[tuple[int, ...], None] = {}
    for cpu in cpus:
        levels = (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*")
        last = max(levels, key=lambda each: read(each / "level"), default=None)
        shared = _numbers(read(last / "shared_cpu_list")) if last else set(cpus)
        found[tuple(each for each in cpus if each in shared or each == cpu)] = None
    return tuple(found)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of its parents, each of which may set a limit: of version 1 if the
    controller has a folder, else of version 2."""
    top, own = root / "sys/fs/cgroup", ""
    is_version_1 = (top / controller).is_dir()
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if (controller in controllers.split(",")) if is_version_1 else not controllers:
            own = path.strip("/")
    top = top / controller if is_version_1 else top
    folder = top / own
    if ".." in folder.parts or not folder.is_dir():  # a container sees only its own group, under another name
        folder = top
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder


def _quotas(root: Path) -> Iterator[float]:
    """The CPU quota of each group that has one, in cores."""
    for group in _groups(root, "cpu"):
        limit, _, period = read(group / "cpu.max").partition(" ")
        if not limit:
            limit, period = read(group / "cpu.cfs_quota_us"), read(group / "cpu.cfs_period_us")
        if limit.isdigit() and period.isdigit() and int(period):  # not "max" or -1
            yield int(limit) / int(period)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, use) in bytes of each group with a limit, without cached files that the system can drop at once."""
    for group in _groups(root, "memory"):
        limit = read(group / "memory.max") or read(group / "memory.limit_in_bytes")
        if limit.isdigit():
            used = read(group / "memory.current") or read(group / "memory.usage_in_bytes")
            stat = re.search(r"^(?:total_)?inactive_file (\d+)$", read(group / "memory.stat"), re.MULTILINE)
            dropped = int(stat.group(1)) if stat else 0
            yield int(limit), max(int(used or 0) - dropped, 0)
