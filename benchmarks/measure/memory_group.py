"""A limit of memory that includes the page cache: a memory cgroup (version 1 or 2) of its own. Needs root."""

from __future__ import annotations

import os
from pathlib import Path

UNLIMITED = 1 << 60


class MemoryGroup:
    """Pages that a member reads from a mapped file are charged to the group, and dropped by the kernel at its limit.

    Pages in memory before are charged to whoever read them first: `drop_page_cache` comes before.
    """

    def __init__(self, name: str) -> None:
        """Make a group. Raises OSError without the right to."""
        top = Path("/sys/fs/cgroup")
        first = (top / "memory").is_dir()
        self.path = (top / "memory" if first else top) / name
        self._limit = self.path / ("memory.limit_in_bytes" if first else "memory.max")
        self.path.mkdir(exist_ok=True)

    def add(self, process: int) -> None:
        (self.path / "cgroup.procs").write_text(str(process))

    def limit(self, num_bytes: int = UNLIMITED) -> None:
        """Set the limit. Pages beyond it are dropped at once."""
        self._limit.write_text(str(num_bytes))

    def leave(self) -> None:
        """Move this process to the group above."""
        (self.path.parent / "cgroup.procs").write_text(str(os.getpid()))


def anonymous_bytes(process: int) -> int:
    """Memory of a process that is not a file's: it stays."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def drop_page_cache() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")
