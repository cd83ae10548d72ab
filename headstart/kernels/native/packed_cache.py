"""Packed weights kept between runs, so that a second start maps a file instead of packing again.

One file per checkpoint and quantization in `packed/` of the user cache. It may be deleted at any time. Whatever is
wrong with it (damage, another version, a changed checkpoint, a folder that cannot be written) only means that weights
are packed again; nothing here raises. The newest 8 files are kept, together within 16 GiB or a quarter of the free
disk, whichever is less; a checkpoint that does not fit is not kept.

File: magic, length and crc32 of the header, header (JSON: key, size of the file, entries), then the matrices, each on
a page boundary. It is written beside its place, synced and renamed, so nobody sees half a file. Opening checks magic,
header and size; `get` checks the first and last 4 KiB of the matrix it returns, as reading all would cost what packing
costs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import numpy as np

from headstart import __version__, hub
from headstart.formats.base import Bytes, ends_crc
from headstart.kernels.native._native import Matrix
from headstart.kernels.ops import RawTensor

LAYOUT = 5
"""Raise with every change of csrc/matrix.h or of what packing yields."""

_MAGIC = b"HSPACKED"
_PREFIX = struct.Struct("<8sII")  # magic, bytes and crc32 of the header
_PAGE = 4096
_MAX_FILES, _MAX_BYTES = 8, 16 << 30
_STALE_SECONDS = 3600


@dataclass(frozen=True)
class Key:
    """What a file holds. Its name follows from `place` only: a changed checkpoint replaces its own old file."""

    place: str
    version: str


def key_of(files: Sequence[Path], quantization: str | None) -> Key | None:
    """The key of a checkpoint's files (weights; trunk and head), or None when one of them cannot be looked at."""
    try:
        seen = hub.stamps(files)
    except OSError:
        return None
    place = hashlib.sha256(json.dumps([[path for path, _, _ in seen], quantization]).encode()).hexdigest()[:32]
    return Key(place, json.dumps([LAYOUT, __version__, quantization, seen]))


@dataclass(frozen=True)
class _Entry:
    """One matrix in the file: its layout, where its data is, and the crc32 of the ends of it."""

    kind: int
    rows: int
    cols: int
    group: int
    zero: int
    scales: int
    offsets: int
    levels: int
    offset: int
    num_bytes: int
    crc: int

    def matrix(self, file: Bytes) -> Matrix | None:
        """Over the file's bytes; None if they are damaged."""
        data = file[self.offset : self.offset + self.num_bytes]
        if ends_crc(data) != self.crc:
            return None
        form = (self.kind, self.rows, self.cols, self.group, self.zero, self.scales, self.offsets)
        return Matrix(*form, data, self.levels)


@dataclass
class PackedCache:
    """The matrices of one checkpoint: those of its file, and those put since."""

    path: Path | None
    key: Key | None
    _mapped: Bytes | None = None
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _new: dict[str, Matrix] = field(default_factory=dict)

    @classmethod
    def open(cls, key: Key | None) -> PackedCache:
        """The cache of a checkpoint; empty when there is no good file. Without a key it keeps nothing."""
        path = hub.cache_dir() / "packed" / f"{key.place}.pack" if key else None
        cache = cls(path, key)
        if path and key:
            with suppress(OSError, ValueError, KeyError, TypeError, struct.error):
                cache._mapped, cache._entries = _read(path, key)
                os.utime(path)  # the least recently used file goes first
        return cache

    def get(self, tensor: RawTensor) -> Matrix | None:
        """The packed form of this tensor [rows, cols], over the mapped file, if it is there and undamaged."""
        entry = self._entries.get(_identity(tensor))
        return entry.matrix(self._mapped) if entry and self._mapped is not None else None

    def put(self, tensor: RawTensor, matrix: Matrix) -> Matrix:
        """Remember a matrix until `save`; returns it."""
        if self.path:
            self._new[_identity(tensor)] = matrix
        return matrix

    def save(self) -> bool:
        """Write the file anew if anything was put: what it had, and what is new. Done by the end of a load. Has it been
        written?"""
        new, self._new = self._new, {}
        if not new or not self.path or not self.key:
            return False
        old = {name: entry.matrix(self._mapped) for name, entry in self._entries.items() if self._mapped is not None}
        matrices = {name: matrix for name, matrix in (old | new).items() if matrix}
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if sum(matrix.num_bytes + _PAGE for matrix in matrices.values()) <= _budget(self.path.parent):
                _write(self.path, self.key, matrices)
                _prune(self.path.parent)
                return self.path.exists()
        return False


def _identity(tensor: RawTensor) -> str:
    """Name, type, shape and a look at the bytes: rows taken from a tensor carry its name too."""
    return f"{tensor.name} {tensor.dtype} {list(tensor.shape)} {tensor.fingerprint():08x}"


def _read(path: Path, key: Key) -> tuple[Bytes, dict[str, _Entry]]:
    """The mapped file and its entries. ValueError, KeyError, TypeError, struct.error or OSError if it is no good."""
    mapped = np.asarray(np.memmap(path, np.uint8, "r"))
    magic, length, crc = _PREFIX.unpack(mapped[: _PREFIX.size].tobytes())
    header = mapped[_PREFIX.size : _PREFIX.size + length].tobytes()
    if magic != _MAGIC or zlib.crc32(header) != crc:
        raise ValueError("damaged")
    read = json.loads(header)
    if read["key"] != key.version or read["size"] != mapped.size:
        raise ValueError("of another checkpoint or version, or cut off")
    return mapped, {name: _Entry(*entry) for name, entry in read["entries"].items()}


def _write(path: Path, key: Key, matrices: dict[str, Matrix]) -> None:
    """Beside its place, then renamed: readers of the old file keep it, concurrent writers do not meet."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".tmp", delete=False) as file:
        try:
            header, start = _header(key, matrices)
            file.write(_PREFIX.pack(_MAGIC, len(header), zlib.crc32(header)) + header)
            for matrix in matrices.values():
                file.seek(start)
                file.write(matrix.data.data)
                start += _page_up(matrix.num_bytes)
            file.truncate(start)
            file.flush()
            os.fsync(file.fileno())  # else a crash could leave the name with holes for weights
            Path(file.name).replace(path)
        finally:
            Path(file.name).unlink(missing_ok=True)


def _header(key: Key, matrices: dict[str, Matrix]) -> tuple[bytes, int]:
    """The header, and where the matrices start. Without its prefix."""
    entries, at = {}, 0
    for name, m in matrices.items():
        form = (m.kind, m.rows, m.cols, m.group, m.zero, m.scales, m.offsets, m.levels)
        entries[name] = _Entry(*form, at, m.num_bytes, ends_crc(m.data))
        at += _page_up(m.num_bytes)

    def text(start: int) -> bytes:
        rows = {name: astuple(replace(entry, offset=start + entry.offset)) for name, entry in entries.items()}
        return json.dumps({"key": key.version, "size": start + at, "entries": rows}).encode()

    start = _page_up(_PREFIX.size + len(text(1 << 40)))  # no offset is longer than these
    return text(start), start


def _page_up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _budget(folder: Path) -> int:
    """Bytes that the folder's files may take in all; its own files count as free."""
    own = sum(file.stat().st_size for file in folder.glob("*.pack"))
    return min(_MAX_BYTES, (shutil.disk_usage(folder).free + own) // 4)


def _prune(folder: Path) -> None:
    """Keep the newest files within the bounds; drop what writers that died have left."""
    newest = sorted(folder.glob("*.pack"), key=lambda file: file.stat().st_mtime, reverse=True)
    room = _budget(folder)
    for place, file in enumerate(newest):
        room -= file.stat().st_size
        if place >= _MAX_FILES or room < 0:
            file.unlink(missing_ok=True)
    for file in folder.glob(".*.tmp"):
        if file.stat().st_mtime < time.time() - _STALE_SECONDS:
            file.unlink(missing_ok=True)
