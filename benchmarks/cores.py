"""What barriers cost on many cores: measured with the threads of this machine, simulated for others.

    python benchmarks/cores.py [--passes 240] [--weights-gb 16] [--bandwidth-gb 400]

A pass of the native backend meets some 240 barriers. Each is simulated as the lines of memory it moves: a core that
arrives takes the counter's line from the core before it, one after the other; cores that wait read the line of the
round, which its writer hands to one after the other too. A line takes LOCAL_NS between cores of one cache and FAR_NS
between caches: published medians for an EPYC of 64 cores, and nothing of this was run on such a machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass

LOCAL_NS, FAR_NS, SOCKET_NS = 20.0, 95.0, 200.0
"""A line of memory from one core to another: of one cache, of another cache, of another socket."""
HAND_NS = 12.0
"""Between two copies of a line that one core hands out."""


@dataclass(frozen=True)
class Cores:
    """Caches of so many cores each, evenly on sockets."""

    caches: int
    in_cache: int
    sockets: int

    @property
    def count(self) -> int:
        return self.caches * self.in_cache

    def hop(self, one: int, other: int) -> float:
        """Nanoseconds of a line from one core to another, both by number."""
        if one // self.in_cache == other // self.in_cache:
            return LOCAL_NS
        in_socket = self.count // self.sockets
        return FAR_NS if one // in_socket == other // in_socket else SOCKET_NS


def gate(cores: Cores, members: list[int], start: float) -> tuple[float, int]:
    """When the last of these has arrived at one counter, and which core that is."""
    at, owner = start, members[0]
    for core in members:
        at += cores.hop(owner, core)
        owner = core
    return at, owner


def released(cores: Cores, owner: int, members: list[int], start: float) -> list[float]:
    """When each has seen the round's end: copies leave one after the other, each on its own way."""
    others = [core for core in members if core != owner]
    return [start + n * HAND_NS + cores.hop(owner, core) for n, core in enumerate(others)] or [start]


def flat(cores: Cores) -> float:
    """Nanoseconds of a barrier with one counter, from the last arrival's start to the last release; all arrive at once."""
    everybody = list(range(cores.count))
    at, owner = gate(cores, everybody, 0.0)
    return max(released(cores, owner, everybody, at))


def grouped(cores: Cores) -> float:
    """The same in groups of one cache, whose last ones meet."""
    groups = [list(range(n * cores.in_cache, (n + 1) * cores.in_cache)) for n in range(cores.caches)]
    arrived = [gate(cores, group, 0.0) for group in groups]
    leaders = [owner for _, owner in arrived]
    at, owner = gate(cores, leaders, max(at for at, _ in arrived))
    opened = released(cores, owner, leaders, at) + [at]
    return max(max(released(cores, leaders[0], groups[0], each)) for each in opened)


def search(cores: Cores, *, in_groups: bool) -> float:
    """Nanoseconds in which a thread without work has seen that nobody has any: a counter of each thread, of which a
    core keeps ten on their way at once."""
    far = cores.count if not in_groups else cores.count - cores.in_cache
    return (far * FAR_NS + (cores.count - far) * LOCAL_NS) / 10


def measured(threads: int, barriers: int) -> float | None:
    """Nanoseconds of a barrier between threads of this machine; None without the native backend."""
    try:
        from headstart.kernels.native._native import ThreadPool, barrier_seconds
    except ImportError:
        return None
    return 1e9 * barrier_seconds(ThreadPool(threads), barriers)


