"""A memory limit that includes the page cache: a memory cgroup (version 1 or 2). Needs root."""

from __future__ import annotations

import os
from pathlib import Path

UNLIMITED = 1 << 60


class MemoryGroup:
    """A cgroup. File pages read by members are charged to the group and dropped by the kernel at the limit.

    Pages already in memory stay charged to their first reader: call `drop_page_cache` before.
    """

    def __init__(self, name: str) -> None:
        """Creates a group. Raises OSError without permission."""
        top = Path("/sys/fs/cgroup")
        first = (top / "memory").is_dir()
        self.path = (top / "memory" if first else top) / name
        self._limit = self.path / ("memory.limit_in_bytes" if first else "memory.max")
        self.path.mkdir(exist_ok=True)

    def add(self, process: int) -> None:
        (self.path / "cgroup.procs").write_text(str(process))

    def limit(self, num_bytes: int = UNLIMITED) -> None:
        """Sets the limit. Pages beyond it are dropped at once."""
        self._limit.write_text(str(num_bytes))

    def leave(self) -> None:
        """Moves this process to the parent group."""
        (self.path.parent / "cgroup.procs").write_text(str(os.getpid()))


def anonymous_bytes(process: int) -> int:
    """Anonymous memory of a process, which cannot be dropped."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def drop_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")
