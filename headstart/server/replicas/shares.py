"""Which part of this machine each replica gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from headstart.errors import UsageError
from headstart.machine import ROOT, Node, cores

NUMA = "numa"
MEMORY_SHARE = 0.5
"""Of the memory that is free before the first of them starts, what the caches of all may take."""


@dataclass(frozen=True)
class Share:
    """`cpus` that a replica keeps to (none: any), and its threads."""

    cpus: tuple[int, ...]
    threads: int


def divide(
    wanted: str, threads: int | None, nodes: Sequence[Node], quota: float | None, root: Path = ROOT
) -> tuple[Share, ...]:
    """The shares of `wanted` replicas, a number or `numa`: one on each node of memory. `threads`: of each, if the user
    says so. Raises UsageError for more than there are cores."""
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
    if quota is not None and quota < len(cpus):  # others use these cores, too: the system deals them out
        return tuple(Share((), threads or most // count) for _ in parts)
    return tuple(Share(part, threads or len(part)) for part in parts)
