"""What meeting costs on many cores: measured with this machine's threads, simulated for machines of up to 128.

    python benchmarks/cores.py [--barriers 240] [--gigabytes 4.5]

A pass of the native backend meets some 240 barriers, and at each a thread without work looks whether another has any.
Simulated is which lines of memory go from core to core. Who arrives at a counter takes its line from the one before;
who waits reads the line of the round, and its writer hands out copies one after the other. Latencies of a line within a
cache, between caches and between sockets: github.com/nviennot/core-to-core-latency (EPYC 7R13, Xeon Platinum 8375C). A
copy every HAND of a latency is assumed. Bandwidths: 8 channels of DDR4-3200 a socket, 80 % of them. Nothing of this
was run on such a machine.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import pairwise

HAND = 0.2
"""Share of a latency after which the writer of a line hands out the next copy."""
AT_ONCE = 10
"""Lines that a core waits for at the same time (its fill buffers)."""
SOCKET_BANDWIDTH = 0.8 * 8 * 25.6e9
SIMULATED = "simulated"


@dataclass(frozen=True)
class Cores:
    """Cores of one kind: how many share a cache, a socket; nanoseconds of a line within each, and between sockets."""

    name: str
    count: int
    in_cache: int
    in_socket: int
    latencies: tuple[float, float, float]

    def hop(self, one: int, other: int) -> float:
        within, between, sockets = self.latencies
        if one // self.in_cache == other // self.in_cache:
            return within
        return between if one // self.in_socket == other // self.in_socket else sockets


AMD, INTEL = (23.0, 107.0, 197.0), (51.0, 51.0, 108.0)
MACHINES = (
    Cores("8 cores of one cache", 8, 8, 8, AMD),
    Cores("32 cores, one cache (Xeon)", 32, 32, 32, INTEL),
    Cores("64 cores, 8 caches (EPYC)", 64, 8, 64, AMD),
    Cores("2 x 32 cores, one cache each (Xeon)", 64, 32, 32, INTEL),
    Cores("2 x 64 cores, 8 caches each (EPYC)", 128, 8, 64, AMD),
)


def arrived(cores: Cores, members: list[int], start: float) -> float:
    """When the last of these has taken the counter's line, if all want it from `start` on."""
    return start + cores.hop(members[0], members[0]) + sum(cores.hop(one, other) for one, other in pairwise(members))


def seen(cores: Cores, members: list[int], start: float) -> float:
    """When all of these have read the line that the last of them has written."""
    hops = [cores.hop(members[-1], core) for core in members[:-1]]
    return max((start + HAND * sum(hops[:n]) + hop for n, hop in enumerate(hops)), default=start)


def barrier(cores: Cores, part: int) -> float:
    """Nanoseconds from the arrival of all to the release of all, in groups of `part` whose last ones meet."""
    groups = [list(range(first, first + part)) for first in range(0, cores.count, part)]
    at = max(arrived(cores, group, 0.0) for group in groups)
    if len(groups) > 1:
        leaders = [group[-1] for group in groups]
        at = seen(cores, leaders, arrived(cores, leaders, at))
    return max(seen(cores, group, at) for group in groups)


def look(cores: Cores) -> float:
    """Nanoseconds in which a thread has read the counters of all the others."""
    return sum(cores.hop(0, core) for core in range(1, cores.count)) / AT_ONCE


def measured(threads: int) -> float | None:
    """Nanoseconds of a barrier here, the least of 20 runs; None without the native backend."""
    try:
        from headstart.kernels.native._native import ThreadPool, barrier_seconds
    except ImportError:
        return None
    pool = ThreadPool(threads)
    return 1e9 * min(barrier_seconds(pool, 20_000) for _ in range(20))


def row(cores: Cores, barriers: int, gigabytes: float) -> list[str]:
    """Of the table: one counter, groups, the search; then a pass over weights on one socket, and on their own."""
    flat, grouped = barrier(cores, cores.count), barrier(cores, min(cores.in_cache, 8))
    meeting = barriers * (grouped + look(cores)) * 1e-6
    sockets = cores.count // cores.in_socket
    reads = [gigabytes * 1e12 / (count * SOCKET_BANDWIDTH) for count in (1, sockets)]
    return [
        cores.name, f"{flat * 1e-3:.1f}", f"{grouped * 1e-3:.1f}", f"{look(cores) * 1e-3:.1f}",
        f"{barriers * (flat + look(cores)) * 1e-6:.2f}", f"{meeting:.2f}",
        f"{reads[0] + meeting:.1f}", f"{reads[1] + meeting:.1f}",
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--barriers", type=int, default=240, help="of a pass")
    parser.add_argument("--gigabytes", type=float, default=4.5, help="of weights that a pass reads")
    options = parser.parse_args()
    here = measured(2)
    if here is not None:
        print(f"measured here: {here:.0f} ns a barrier of 2 threads", file=sys.stderr)
    titles = [
        SIMULATED, "one counter, us", "in groups, us", "looking for work, us", "a pass, ms: one counter", "in groups",
        f"{options.gigabytes:g} GB on one socket, ms", "beside their cores, ms",
    ]  # fmt: skip
    lines = [titles, ["---"] * len(titles), *(row(each, options.barriers, options.gigabytes) for each in MACHINES)]
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
