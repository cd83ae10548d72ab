"""Where the threads of a pool run, and where weights lie, on machines with several caches or nodes of memory.

Threads of one last-level cache form a group: barriers go through groups first (csrc/pool.h), work is taken over inside
them first. Weights lie beside the threads that read them. One cache, few cores: nothing of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from headstart.config import Numa
from headstart.errors import UsageError
from headstart.machine import Node

Group = tuple[int, int, tuple[int, ...]]
"""Threads, the number of their node counted from 0, CPUs that they keep to (none: any)."""

LARGE, PART = 16, 8
"""Groups of LARGE threads or more meet in parts of PART: fewer cores pull at each line of memory."""


@dataclass(frozen=True)
class Placement:
    """Groups of a thread pool (none: threads run where the system puts them), how weights are put on nodes (None: they
    stay where they are), and why, for doctor."""

    groups: tuple[Group, ...] = ()
    weights: Literal["share", "replicate", "interleave"] | None = None
    why: str = "one group of threads"


FREE = Placement()


def decide(threads: int, numa: Numa | None, nodes: Sequence[Node], quota: float | None) -> Placement:
    """The placement of so many threads. A quota of cores means that others use them too: then nothing is bound unless
    it is asked for. Raises UsageError for --numa replicate or interleave with fewer threads than nodes."""
    asked = numa in ("replicate", "interleave") and len(nodes) > 1
    if numa == "off":
        return Placement(why="off")
    if asked and threads < len(nodes):
        what = f"--numa {numa} needs a thread on each of {len(nodes)} nodes, but --threads is {threads}"
        raise UsageError(what, "use more threads, or leave --numa out")
    if threads < len(nodes) or (quota is not None and not asked):
        why = "fewer threads than nodes" if threads < len(nodes) else f"a quota of {quota:g} cores"
        return Placement(why=f"{why}: threads run where the system puts them")
    binds = sum(len(node.caches) for node in nodes) > 1
    groups: list[Group] = []
    for place, of_node in enumerate(_shares(threads, [len(node.cpus) for node in nodes])):
        in_node = nodes[place].caches
        for cache, count in zip(in_node, _shares(of_node, [len(cache) for cache in in_node], least=0), strict=True):
            groups += [(part, place, cache if binds else ()) for part in _parts(count)]
    if len(groups) == 1:
        return FREE
    if len(nodes) == 1:
        return Placement(tuple(groups), None, f"one node, {len(groups)} groups of threads")
    weights = numa if numa in ("replicate", "interleave") else "share"
    said = {"share": "each core's share of the weights beside it", "replicate": "all weights on each node"}
    why = f"{len(nodes)} nodes, {len(groups)} groups of threads; {said.get(weights, 'pages of weights in turn')}"
    return Placement(tuple(groups), weights, why)


def _shares(count: int, sizes: Sequence[int], least: int = 1) -> list[int]:
    """`count` in proportion to sizes, at least `least` for each."""
    bounds = [count * sum(sizes[:end]) // sum(sizes) for end in range(len(sizes) + 1)]
    shares = [last - first for first, last in pairwise(bounds)]
    while min(shares) < least:  # the largest gives
        shares[shares.index(max(shares))] -= 1
        shares[shares.index(min(shares))] += 1
    return shares


def _parts(count: int) -> list[int]:
    if count < LARGE:
        return [count] if count else []
    parts = -(-count // PART)
    return [count * (part + 1) // parts - count * part // parts for part in range(parts)]
