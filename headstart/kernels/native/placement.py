"""Placement of threads and weights on machines with several last-level caches or NUMA nodes.

Threads that share a last-level cache form a group, within which barriers and work stealing go first (csrc/pool.h).
Weights are placed on the node of the threads that read them. With one cache and few cores nothing is placed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from headstart.config import Numa
from headstart.errors import ParameterError
from headstart.machine import Node
from headstart.wording import LEAVE_OUT, option

Group = tuple[int, int, tuple[int, ...]]
"""(number of threads, index of their NUMA node, CPUs they are bound to; empty: any CPU)."""

MAX_GROUP, GROUP_PART = 16, 8
"""Groups of MAX_GROUP threads or more are split into parts of GROUP_PART, so that fewer cores share a cache line."""


@dataclass(frozen=True)
class ThreadPlacement:
    """Groups of a thread pool, and how weights are placed."""

    groups: tuple[Group, ...] = ()  # empty: the system places the threads
    weights: Literal["share", "replicate", "interleave"] | None = None  # None: not moved
    why: str = "one group of threads"  # for doctor


FREE = ThreadPlacement()


def choose_placement(threads: int, numa: Numa | None, nodes: Sequence[Node], quota: float | None) -> ThreadPlacement:
    """The placement of `threads` threads. A CPU quota means shared cores: then threads are bound only if --numa asks
    for it. Raises UsageError for --numa replicate or interleave with fewer threads than nodes."""
    is_requested = numa in ("replicate", "interleave") and len(nodes) > 1
    if numa == "off":
        return ThreadPlacement(why="off")
    if is_requested and threads < len(nodes):
        what = f"{numa} needs a thread on each of {len(nodes)} nodes, but there are {threads}"
        raise ParameterError(option("numa"), what, "use more threads, or " + LEAVE_OUT)
    if threads < len(nodes) or (quota is not None and not is_requested):
        why = "fewer threads than nodes" if threads < len(nodes) else f"a quota of {quota:g} cores"
        return ThreadPlacement(why=f"{why}: threads run where the system puts them")
    binds = sum(len(node.caches) for node in nodes) > 1
    groups: list[Group] = []
    for index, node_threads in enumerate(_shares(threads, [len(node.cpus) for node in nodes])):
        caches = nodes[index].caches
        counts = _shares(node_threads, [len(cache) for cache in caches], minimum=0)
        for cache, count in zip(caches, counts, strict=True):
            groups += [(part, index, cache if binds else ()) for part in _parts(count)]
    if len(groups) == 1:
        return FREE
    if len(nodes) == 1:
        return ThreadPlacement(tuple(groups), None, f"one node, {len(groups)} groups of threads")
    weights = numa if numa in ("replicate", "interleave") else "share"
    texts = {"share": "each core's share of the weights beside it", "replicate": "all weights on each node"}
    why = f"{len(nodes)} nodes, {len(groups)} groups of threads; {texts.get(weights, 'pages of weights in turn')}"
    return ThreadPlacement(tuple(groups), weights, why)


def _shares(count: int, sizes: Sequence[int], minimum: int = 1) -> list[int]:
    """Split `count` in proportion to sizes, at least `minimum` each."""
    bounds = [count * sum(sizes[:end]) // sum(sizes) for end in range(len(sizes) + 1)]
    shares = [last - first for first, last in pairwise(bounds)]
    while min(shares) < minimum:  # take from the largest
        shares[shares.index(max(shares))] -= 1
        shares[shares.index(min(shares))] += 1
    return shares


def _parts(count: int) -> list[int]:
    """Sizes of the parts of one group of threads."""
    if count < MAX_GROUP:
        return [count] if count else []
    parts = -(-count // GROUP_PART)
    return [count * (part + 1) // parts - count * part // parts for part in range(parts)]
