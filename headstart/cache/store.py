"""KV blocks in files: a directory that outlives the process and that several processes may use at once.

DIR/PART/KK/KEY is one part of one block (the trunk's KV, a head's KV, a recurrent state). PART is a digest of the model
and its settings, KEY of the block's tokens and all before them. A file has a header, a digest, and the bytes. It is
written under a temporary name, renamed, and checked at every read; damaged files are removed. Nothing is synced to
disk, because the digest detects files that a crash left incomplete.

The system's page cache is the memory tier above the disk: recently used files are read from there, by every process.
"""

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

from headstart.core import Bytes
from headstart.errors import UsageError
from headstart.files import read_regular
from headstart.wording import option

Tier = Literal["ram", "disk"]
log = logging.getLogger("headstart.cache")

MAGIC = b"headstart kv 1\n\0"
DIGEST_BYTES, KEY_BYTES = 32, 16
_HEADER = struct.Struct(f"<{len(MAGIC)}s{KEY_BYTES}s{KEY_BYTES}sQ")
HEADER_BYTES = _HEADER.size + DIGEST_BYTES
PAGE = 4096  # files count in whole pages, as most disks store them
EVICT_ABOVE = 7 / 8  # share of the size limit from which the oldest files are removed
SCANS_PER_LIMIT = 64
"""A process scans the directory again after writing 1 / SCANS_PER_LIMIT of the limit, so that up to eight processes
together stay within it."""
RETRY_S = 30.0  # seconds without writes after a failed one
STALE_S = 600.0  # age in seconds at which a temporary file is removed
_TEMPORARY = ".new-"
_CAN_ADVISE = hasattr(os, "posix_fadvise")
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


@dataclass
class StoreCounts:
    """Counters of one process."""

    saved: int = 0
    saved_bytes: int = 0
    loaded: Counter[Tier] = field(default_factory=Counter)  # files, by tier
    loaded_bytes: Counter[Tier] = field(default_factory=Counter)  # by tier
    dropped: int = 0  # damaged files removed
    evicted: int = 0  # oldest files removed to make room
    failed: int = 0  # failed writes


class BlockStore:
    """A directory of blocks with at most `max_bytes`. Thread-safe and process-safe. Raises UsageError if the directory
    cannot be created or written."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes, self.counts = folder, max_bytes, StoreCounts()
        self._guard = threading.Lock()  # protects all fields below and the counts
        self._used_bytes = 0  # of the directory at the last scan, plus those that this process has written since
        self._new_bytes = 0  # written by this process since the last scan
        self._oldest: deque[tuple[int, int, Path]] = deque()  # (time of last use, bytes, path) at the last scan
        self._scanned = self._logged_drop = self._logged_failure = False
        self._paused_until = 0.0
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # private: blocks are derived from prompts
            probe = folder / f"{_TEMPORARY}{secrets.token_hex(6)}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            what = option("kv_spill") + f": cannot write {folder}: {error.strerror}"
            raise UsageError(what, "name a directory that may be written") from None

    def path(self, part: str, key: bytes) -> Path:
        name = key.hex()
        return self.folder / part / name[:2] / name

    def has(self, part: str, key: bytes) -> bool:
        return self.path(part, key).exists()

    def touch(self, part: str, key: bytes, when_ns: int) -> bool:
        """Marks a block as used now; False if it is not stored."""
        try:
            os.utime(self.path(part, key), ns=(when_ns, when_ns))
        except OSError:
            return False
        return True

    def put(self, part: str, key: bytes, content: Seq[Bytes], when_ns: int) -> bool:
        """Writes a block, the concatenated `content`; `when_ns` is its time of last use.

        Returns False if it was not stored because the disk is full or not writable, which is logged once.
        """
        if time.monotonic() < self._paused_until:
            return False
        size = HEADER_BYTES + sum(piece.nbytes for piece in content)
        if not self._make_room(size):
            return False
        header = _header(part, key, size - HEADER_BYTES)
        pieces: list[bytes | memoryview] = [header, _digest(header, content), *(piece.data for piece in content)]
        try:
            self._write(self.path(part, key), pieces, when_ns)
        except OSError as error:
            self._log_failure(error)
            return False
        with self._guard:
            self.counts.saved += 1
            self.counts.saved_bytes += size
        return True

    def put_file(self, part: str, key: bytes, data: bytes, when_ns: int) -> bool:
        """Stores a block file of another store; False if it is damaged or cannot be stored."""
        content = np.frombuffer(data, np.uint8)
        if not _is_whole(part, key, content):
            return False
        return self.put(part, key, [content[HEADER_BYTES:]], when_ns)

    def read_file(self, part: str, key: bytes) -> bytes | None:
        """Bytes of a block's file, for `put_file` elsewhere; not checked."""
        try:
            return read_regular(self.path(part, key))
        except OSError:
            return None

    def get(self, part: str, key: bytes, num_bytes: int, *, cold: bool = False) -> tuple[Bytes, Tier] | None:
        """A block's bytes and tier; None if it is missing or damaged. cold: it was on disk before `read_ahead`."""
        path = self.path(part, key)
        try:
            handle = os.open(path, _READ)
        except OSError:
            return None
        try:
            files = os.fstat(handle)
            whole = stat.S_ISREG(files.st_mode) and files.st_size == HEADER_BYTES + num_bytes
            data, tier = _read(handle, files.st_size) if whole else (np.empty(0, np.uint8), None)
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
        """Asks the disk to read a file; False if it is already in memory."""
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
        temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(6)}")
        try:
            try:
                handle = _create(temporary)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                handle = _create(temporary)
            with os.fdopen(handle, "wb", buffering=0) as file:
                for piece in pieces:
                    _write_all(file, piece)
            os.utime(temporary, ns=(when_ns, when_ns))
            temporary.replace(path)
        finally:
            with suppress(OSError):  # exists only after an error
                temporary.unlink(missing_ok=True)

    def _log_failure(self, error: OSError) -> None:
        """Logs the first failure and pauses writes; requests go on without."""
        with self._guard:
            self.counts.failed += 1
            was_logged, self._logged_failure = self._logged_failure, True
            self._paused_until = time.monotonic() + RETRY_S
        if not was_logged:
            log.warning("cannot store blocks in %s: %s; they are computed instead", self.folder, error.strerror)

    def _drop(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()
        with self._guard:
            self.counts.dropped += 1
            was_logged, self._logged_drop = self._logged_drop, True
        if not was_logged:
            log.warning("removed a damaged block file: %s (later ones are only counted)", path)

    def _make_room(self, size: int) -> bool:
        """Counts a file to be written, after removing old ones at need; False for a file that is too large."""
        pages, limit = _pages(size), int(self.max_bytes * EVICT_ABOVE)
        if pages > limit // SCANS_PER_LIMIT:
            limit = self.max_bytes - pages  # a limit of few blocks: scan each time
        if limit < 0:
            return False
        with self._guard:
            if not self._scanned or self._new_bytes + pages > self.max_bytes // SCANS_PER_LIMIT:
                self._scan()
            while self._used_bytes + pages > limit and self._oldest:
                self._evict(*self._oldest.popleft())
            if self._used_bytes + pages > self.max_bytes:
                return False
            self._used_bytes += pages
            self._new_bytes += pages
            return True

    def _evict(self, when_ns: int, taken: int, path: Path) -> None:
        """Removes a file last used at `when_ns`; a file used since then is removed later."""
        with suppress(OSError):  # another process removed it
            if (used_ns := path.stat().st_mtime_ns) != when_ns:
                self._oldest.append((used_ns, taken, path))
                return
            path.unlink()
            self.counts.evicted += 1
        self._used_bytes -= taken

    def _scan(self) -> None:
        """Lists the files of all processes."""
        files, now = [], time.time_ns()
        for each in _files(self.folder):
            with suppress(OSError):  # removed meanwhile
                status = each.stat(follow_symlinks=False)
                is_stale = each.name.startswith(_TEMPORARY) and now - status.st_mtime_ns > STALE_S * 1e9
                if is_stale:
                    Path(each.path).unlink()
                else:
                    files.append((status.st_mtime_ns, _pages(status.st_size), Path(each.path)))
        files.sort()
        self._used_bytes, self._new_bytes, self._scanned = sum(size for _, size, _ in files), 0, True
        self._oldest = deque(each for each in files if not each[2].name.startswith(_TEMPORARY))


def time_of_use(now_ns: int, place: int) -> int:
    """Time of last use in ns of block `place` of a prefix that is used now. Later blocks get older times, so that they
    are evicted first: they need the earlier ones."""
    return now_ns - place * 1000


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


def _header(part: str, key: bytes, num_bytes: int) -> bytes:
    return _HEADER.pack(MAGIC, bytes.fromhex(part), key, num_bytes)


def _digest(header: bytes, content: Seq[Bytes]) -> bytes:
    digest = hashlib.sha256(header)  # processors have instructions for it: twice as fast as blake2b
    for piece in content:
        digest.update(piece.data)
    return digest.digest()


def _is_whole(part: str, key: bytes, data: Bytes) -> bool:
    """True if the bytes are an undamaged file of this block."""
    if len(data) < HEADER_BYTES:
        return False
    header = _header(part, key, len(data) - HEADER_BYTES)
    return data[:HEADER_BYTES].tobytes() == header + _digest(header, [data[HEADER_BYTES:]])


def _read(handle: int, size: int) -> tuple[Bytes, Tier | None]:
    """All bytes and the tier they came from; the tier is None for a truncated file."""
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
    """Number of bytes read from memory; None if that needs a disk or is not known."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    try:
        return os.preadv(handle, [view], at, os.RWF_NOWAIT)
    except OSError:  # not in memory, or not supported by the file system
        return None
