"""What this machine leaves to this process: processor, threads, memory. Containers and their limits are read here only.

`root` is where the system's files lie; tests make up others.
"""

from __future__ import annotations

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
UNKNOWN_MEMORY = 4 << 30
"""Taken to be free where the system does not tell."""


@dataclass(frozen=True)
class Cpu:
    """Its name, and the instruction sets that matter to kernels."""

    model: str
    instruction_sets: tuple[str, ...]


@dataclass(frozen=True)
class Threads:
    """Cores of the machine, those this process may run on, those that its cgroup's quota is worth (None: no quota)."""

    cores: int
    affinity: int
    quota: float | None

    @property
    def usable(self) -> int:
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota)))


@dataclass(frozen=True)
class Node:
    """A node of memory (a socket, or a part of one) and the CPUs there that this process may run on: those that share
    a last-level cache stand together."""

    number: int
    caches: tuple[tuple[int, ...], ...]

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(cpu for cache in self.caches for cpu in cache)


@dataclass(frozen=True)
class Memory:
    """Bytes: of the machine, free for this process without swapping, and its cgroup's limit (None: no limit)."""

    total: int
    available: int
    limit: int | None


def cpu(root: Path = ROOT) -> Cpu:
    text = read(root / "proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    name = model.group(1) if model else platform.processor() or "unknown"
    return Cpu(name, tuple(each for each in INSTRUCTION_SETS if each in present))


def threads(root: Path = ROOT) -> Threads:
    cores = os.cpu_count() or 1
    affinity = len(system.cpus())
    return Threads(cores, affinity, min(_quotas(root), default=None))


def nodes(root: Path = ROOT, usable: Collection[int] | None = None) -> tuple[Node, ...]:
    """Nodes that have CPUs which this process may run on (`usable` stands in for them); one node where the system
    does not tell."""
    if usable is None:
        usable = system.cpus()
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda each: int(each.name[4:]))
    found = [(int(each.name[4:]), sorted(_numbers(read(each / "cpulist")) & set(usable))) for each in folders]
    found = [(number, cpus) for number, cpus in found if cpus] or [(0, sorted(usable))]
    return tuple(Node(number, _caches(root, cpus)) for number, cpus in found)


def cores(of: Sequence[Node], root: Path = ROOT) -> list[tuple[int, ...]]:
    """The CPUs of each core, which share its arithmetic: node by node, and there cache by cache. One CPU each where the
    system does not tell."""
    found: dict[tuple[int, ...], list[int]] = {}
    for cpu in (cpu for node in of for cpu in node.cpus):
        shared = _numbers(read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"))
        found.setdefault(tuple(sorted(shared | {cpu})), []).append(cpu)
    return [tuple(each) for each in found.values()]


def memory(root: Path = ROOT) -> Memory:
    found = {
        name: int(size) * 1024 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", read(root / "proc/meminfo"), re.M)
    }
    total, available = found.get("MemTotal", 0), found.get("MemAvailable", UNKNOWN_MEMORY)
    limits = [(limit, used) for limit, used in _memory_limits(root) if not total or limit < total]
    free = [max(limit - used, 0) for limit, used in limits]
    return Memory(total, min([available, *free]), min((limit for limit, _ in limits), default=None))


def identity() -> dict[str, Any]:
    """What measurements hold for."""
    return {"system": platform.uname()[:5], "cpu": cpu().model}


def read(path: Path) -> str:
    """Stripped text of a file of the system; empty if it is not there."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _numbers(text: str) -> set[int]:
    """Of a list as the system writes it, such as 0-3,8."""
    ranges = [re.fullmatch(r"(\d+)(?:-(\d+))?", part) for part in text.split(",")]
    return {n for each in ranges if each for n in range(int(each[1]), int(each[2] or each[1]) + 1)}


def _caches(root: Path, cpus: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """These CPUs by the last-level cache that they share; together where the system does not tell."""
    found: dict[tuple[int, ...], None] = {}
    for cpu in cpus:
        levels = (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*")
        last = max(levels, key=lambda each: read(each / "level"), default=None)
        shared = _numbers(read(last / "shared_cpu_list")) if last else set(cpus)
        found[tuple(each for each in cpus if each in shared or each == cpu)] = None
    return tuple(found)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroup and of those around it, each of which may limit it: of version 1 if
    the controller has a folder of its own, else of version 2."""
    top, own = root / "sys/fs/cgroup", ""
    first = (top / controller).is_dir()
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if (controller in controllers.split(",")) if first else not controllers:
            own = path.strip("/")
    top = top / controller if first else top
    folder = top / own
    if ".." in folder.parts or not folder.is_dir():  # a container that sees only its own group, under another name
        folder = top
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder


def _quotas(root: Path) -> Iterator[float]:
    """Cores that each group's quota is worth."""
    for group in _groups(root, "cpu"):
        limit, _, period = read(group / "cpu.max").partition(" ")
        if not limit:
            limit, period = read(group / "cpu.cfs_quota_us"), read(group / "cpu.cfs_period_us")
        if limit.isdigit() and period.isdigit() and int(period):  # not "max" or -1
            yield int(limit) / int(period)


def _memory_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, use) of each group that has one. Cached files that can be dropped at once are no use of it."""
    for group in _groups(root, "memory"):
        limit = read(group / "memory.max") or read(group / "memory.limit_in_bytes")
        if limit.isdigit():
            used = read(group / "memory.current") or read(group / "memory.usage_in_bytes")
            stat = re.search(r"^(?:total_)?inactive_file (\d+)$", read(group / "memory.stat"), re.MULTILINE)
            dropped = int(stat.group(1)) if stat else 0
            yield int(limit), max(int(used or 0) - dropped, 0)
