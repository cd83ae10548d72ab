"""Blocks in files: a directory that outlives the process, and that all processes of a machine may use at once.

DIR/PART/KK/KEY is one block of one part (the trunk's keys and values, a head's, a recurrent state): PART names all that
its bits depend on, KEY its tokens and everything before them. A file is a header, a digest of all else, the bytes. It
is written aside and renamed, and checked whenever it is read: what is cut, bent or of something else is removed.
Nothing is forced to the disk, since a file that a crash has left in pieces is found by its digest.

The system's page cache is the tier of memory above the disk: a file that was written or read lately is read from there,
in every process, and goes when memory is needed for something else.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headstart.errors import UsageError
from headstart.files import read_regular

Tier = Literal["ram", "disk"]
Bytes = NDArray[np.uint8]
log = logging.getLogger("headstart.cache")

MAGIC = b"headstart kv 1\n\0"
DIGEST_BYTES, KEY_BYTES = 32, 16
_HEAD = struct.Struct(f"<{len(MAGIC)}s{KEY_BYTES}s{KEY_BYTES}sQ")
HEADER_BYTES = _HEAD.size + DIGEST_BYTES
PAGE = 4096
"""Files are counted in whole pages, as most disks store them."""
FULL_AT, SCAN_EVERY = 7 / 8, 64
"""Share of the bound from which the oldest go, and the part of it that a process writes between two looks at what
others have written: so as many as eight processes stay within the bound."""
PAUSE = 30.0
"""Seconds without a write after one that failed."""
LEFT_AFTER = 600.0
"""Seconds after which a file aside is nobody's."""
_ASIDE = ".new-"
_CAN_ADVISE = hasattr(os, "posix_fadvise")
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@dataclass
class Counts:
    """What one process has done. `loaded` and `loaded_bytes` by tier; `dropped`: files that were not what they should
    be; `evicted`: the oldest, for want of room; `failed`: writes."""

    saved: int = 0
    saved_bytes: int = 0
    loaded: Counter[Tier] = field(default_factory=Counter)
    loaded_bytes: Counter[Tier] = field(default_factory=Counter)
    dropped: int = 0
    evicted: int = 0
    failed: int = 0


class BlockStore:
    """A directory of blocks within `max_bytes`. Any thread may use it, and any number of processes. Raises UsageError
    for a directory that cannot be made or written."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes, self.counts = folder, max_bytes, Counts()
        self._guard = threading.Lock()  # of what follows, and of counts
        self._used = self._since_scan = 0  # bytes that were seen at the last look and written since; the latter alone
        self._oldest: deque[tuple[int, int, Path]] = deque()  # (time of last use, bytes, path) at the last look
        self._scanned = self._told_dropped = self._told_failed = False
        self._paused_until = 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # what it holds is made of prompts
            trial = folder / f"{_ASIDE}{secrets.token_hex(6)}"
            trial.touch()
            trial.unlink()
        except OSError as error:
            what = f"--kv-spill: cannot write {folder}: {error.strerror}"
            raise UsageError(what, "name a directory that may be written") from None

    def path(self, part: str, key: bytes) -> Path:
        name = key.hex()
        return self.folder / part / name[:2] / name

    def has(self, part: str, key: bytes) -> bool:
        return self.path(part, key).exists()

    def touch(self, part: str, key: bytes, when_ns: int) -> bool:
        """It was used just now; False where it is not there."""
        try:
            os.utime(self.path(part, key), ns=(when_ns, when_ns))
        except OSError:
            return False
        return True

    def put(self, part: str, key: bytes, content: Seq[Bytes], when_ns: int) -> bool:
        """Keep a block, whose bytes are those of `content` one after the other; `when_ns` tells how old it is. False
        where it was not kept: the disk is full, or cannot be written; the log has said so once."""
        if time.monotonic() < self._paused_until:
            return False
        size = HEADER_BYTES + sum(piece.nbytes for piece in content)
        if not self._make_room(size):
            return False
        head = _head(part, key, size - HEADER_BYTES)
        pieces: list[bytes | memoryview] = [head, _digest(head, content), *(piece.data for piece in content)]
        try:
            self._write(self.path(part, key), pieces, when_ns)
        except OSError as error:
            self._fail(error)
            return False
        with self._guard:
            self.counts.saved += 1
            self.counts.saved_bytes += size
        return True

    def put_file(self, part: str, key: bytes, data: bytes, when_ns: int) -> bool:
        """Keep a block as its file has it elsewhere; False where it is no such file, or cannot be kept."""
        content = np.frombuffer(data, np.uint8)
        if not _is_whole(part, key, content):
            return False
        return self.put(part, key, [content[HEADER_BYTES:]], when_ns)

    def read_file(self, part: str, key: bytes) -> bytes | None:
        """A block as its file has it, for `put_file` elsewhere; nothing is checked here."""
        try:
            return read_regular(self.path(part, key))
        except OSError:
            return None

    def get(self, part: str, key: bytes, num_bytes: int, *, cold: bool = False) -> tuple[Bytes, Tier] | None:
        """The bytes of a block and where they were, or None where it is not there or not as it should be. `cold`: it
        was not in memory before it was read ahead."""
        path = self.path(part, key)
        try:
            handle = os.open(path, _READ)
        except OSError:
            return None
        try:
            found = os.fstat(handle)
            whole = stat.S_ISREG(found.st_mode) and found.st_size == HEADER_BYTES + num_bytes
            data, tier = _read(handle, found.st_size) if whole else (np.empty(0, np.uint8), None)
        except OSError as error:
            log.warning("cannot read %s: %s", path, error.strerror)
            return None
        finally:
            os.close(handle)
        if tier is None or not _is_whole(part, key, data):
            self._drop(path)
            return None
        tier = "disk" if cold else tier
        with self._guard:
            self.counts.loaded[tier] += 1
            self.counts.loaded_bytes[tier] += len(data)
        return data[HEADER_BYTES:], tier

    def read_ahead(self, part: str, key: bytes) -> bool:
        """It will be read soon: a disk may begin. True where it has to."""
        with suppress(OSError):
            handle = os.open(self.path(part, key), _READ)
            try:
                if _read_cached(handle, memoryview(bytearray(1)), HEADER_BYTES) is None and _CAN_ADVISE:
                    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
                    return True
            finally:
                os.close(handle)
        return False

    def _write(self, path: Path, pieces: Seq[bytes | memoryview], when_ns: int) -> None:
        aside = path.with_name(f"{_ASIDE}{secrets.token_hex(6)}")
        try:
            try:
                handle = _create(aside)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                handle = _create(aside)
            with os.fdopen(handle, "wb", buffering=0) as file:
                for piece in pieces:
                    _write_all(file, piece)
            os.utime(aside, ns=(when_ns, when_ns))
            aside.replace(path)
        finally:
            with suppress(OSError):  # it is there only where something went wrong
                aside.unlink(missing_ok=True)

    def _fail(self, error: OSError) -> None:
        """Serving goes on without; the next one tries again after a while."""
        with self._guard:
            self.counts.failed += 1
            told, self._told_failed = self._told_failed, True
            self._paused_until = time.monotonic() + PAUSE
        if not told:
            log.warning("cannot keep blocks in %s: %s; requests are served without", self.folder, error.strerror)

    def _drop(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()
        with self._guard:
            self.counts.dropped += 1
            told, self._told_dropped = self._told_dropped, True
        if not told:
            log.warning("a broken block was dropped: %s (more of them are only counted)", path)

    # The bound.

    def _make_room(self, size: int) -> bool:
        """Count a file that will be written, after the oldest have gone where there is no room; False for one that is
        too large to keep."""
        pages, limit = _pages(size), int(self.max_bytes * FULL_AT)
        if pages > limit // SCAN_EVERY:
            limit = self.max_bytes - pages  # a bound of few blocks: look each time
        if limit < 0:
            return False
        with self._guard:
            if not self._scanned or self._since_scan + pages > self.max_bytes // SCAN_EVERY:
                self._scan()
            while self._used + pages > limit and self._oldest:
                self._evict(*self._oldest.popleft())
            if self._used + pages > self.max_bytes:
                return False
            self._used += pages
            self._since_scan += pages
            return True

    def _evict(self, when_ns: int, taken: int, path: Path) -> None:
        """Remove a file that was last used then; one that has been used since goes later."""
        with suppress(OSError):  # another process was quicker
            if (used_ns := path.stat().st_mtime_ns) != when_ns:
                self._oldest.append((used_ns, taken, path))
                return
            path.unlink()
            self.counts.evicted += 1
        self._used -= taken

    def _scan(self) -> None:
        """What all processes have in the directory by now."""
        found, now = [], time.time_ns()
        for each in _files(self.folder):
            with suppress(OSError):  # gone meanwhile
                known = each.stat(follow_symlinks=False)
                left = each.name.startswith(_ASIDE) and now - known.st_mtime_ns > LEFT_AFTER * 1e9
                if left:
                    Path(each.path).unlink()
                else:
                    found.append((known.st_mtime_ns, _pages(known.st_size), Path(each.path)))
        found.sort()
        self._used, self._since_scan, self._scanned = sum(size for _, size, _ in found), 0, True
        self._oldest = deque(each for each in found if not each[2].name.startswith(_ASIDE))


def _files(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield entry
    except OSError:  # removed meanwhile
        return


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)


def _write_all(file: Any, piece: bytes | memoryview) -> None:
    view = memoryview(piece).cast("B")
    while view:
        view = view[file.write(view) :]


def _head(part: str, key: bytes, num_bytes: int) -> bytes:
    return _HEAD.pack(MAGIC, bytes.fromhex(part), key, num_bytes)


def _digest(head: bytes, content: Seq[Bytes]) -> bytes:
    digest = hashlib.sha256(head)  # processors have instructions for it: twice as fast as blake2b
    for piece in content:
        digest.update(piece.data)
    return digest.digest()


def _is_whole(part: str, key: bytes, data: Bytes) -> bool:
    """Is it the file of this very block, as it was written?"""
    head = _head(part, key, len(data) - HEADER_BYTES) if len(data) >= HEADER_BYTES else b""
    given = data[: _HEAD.size].tobytes()
    return given == head and data[_HEAD.size : HEADER_BYTES].tobytes() == _digest(head, [data[HEADER_BYTES:]])


def _read(handle: int, size: int) -> tuple[Bytes, Tier | None]:
    """All bytes, and whether they were in memory; the tier is None for a file that ends before."""
    data: Bytes = np.empty(size, np.uint8)
    view, at = data.data, 0
    tier: Tier = "ram"
    while at < size:
        count = _read_cached(handle, view[at:], at) if tier == "ram" else None
        if count is None:
            tier = "disk"
            os.lseek(handle, at, os.SEEK_SET)
            with FileIO(handle, closefd=False) as file:
                count = file.readinto(view[at:]) or 0
        if count == 0:
            return data, None
        at += count
    return data, tier


def _read_cached(handle: int, view: memoryview, at: int) -> int | None:
    """Bytes that were read without a disk; None where that needs one, or nobody can tell."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    try:
        return os.preadv(handle, [view], at, os.RWF_NOWAIT)
    except OSError:  # not there, or a file system that does not tell
        return None
