"""Packs a file's weights for the native kernels (csrc/matrix.h), and caches packed weights in files."""

import hashlib
import json
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from headstart import hub
from headstart.formats.base import Bytes, Tensor, ends_crc
from headstart.kernels.native._native import Matrix, ThreadPool, dequantize_into, matrix_bytes, pack_rows, source_form
from headstart.kernels.ops import RawTensor
from headstart.version import __version__

Quantization = Literal["int8", "int4"]

_ALIGN = 64  # bytes
_FLOATS_AT_ONCE = 4 << 20  # elements packed at a time
_BITS = {0: 32, 1: 16, 2: 16, 3: 8, 4: 4, 5: 9, 6: 4, 7: 6, 8: 5}
"""Matrix kind -> bits of one weight without scales. FP8 counts as more than int8, which is faster."""
_BITS_OF: Mapping[Quantization, int] = {"int8": 8, "int4": 4}


def pack(tensor: RawTensor, pool: ThreadPool, quantization: Quantization | None = None) -> Matrix:
    """Pack a weight [rows, cols]. Without quantization every value stays the same.

    quantization: round to groups of 32 with a float16 scale (int8) or scale and minimum (int4), unless the file's type
    has no more bits. Types without a kernel become float32. Raises ValueError if the tensor is not a matrix.
    """
    if len(tensor.shape) != 2:
        raise ValueError(f"tensor {tensor.name} has the shape {list(tensor.shape)}, but a matrix is wanted")
    rows, cols = tensor.shape
    source = _source(tensor, quantization)
    layout = source_form(source)
    assert layout is not None, source
    kind, group, zero, scales, offsets, levels = layout
    out = aligned_empty(matrix_bytes(kind, rows, cols, group, scales, offsets))
    if isinstance(tensor, Tensor) and source == tensor.dtype:
        pack_rows(pool, source, tensor.data, cols, out)
    else:
        _pack_parts(tensor, pool, source, out)
    return Matrix(kind, rows, cols, group, zero, scales, offsets, out, levels)


def dequantize(matrix: Matrix, pool: ThreadPool) -> NDArray[np.float32]:
    """The values of a packed matrix, float32 [rows, cols]."""
    out = np.empty((matrix.rows, matrix.cols), np.float32)
    dequantize_into(pool, matrix, out)
    return out


def aligned_empty(size: int) -> Bytes:
    """Uninitialized uint8 [size] on a 64-byte boundary."""
    raw = np.empty(size + _ALIGN, np.uint8)
    begin = -raw.ctypes.data % _ALIGN
    return raw[begin : begin + size]


def _source(tensor: RawTensor, quantization: Quantization | None) -> str:
    """Source type for packing: the tensor's own type, "F32" for converted float32 rows, or the quantization."""
    own = source_form(tensor.dtype)
    if quantization and (own is None or _BITS[own[0]] > _BITS_OF[quantization]):
        return quantization
    return "F32" if own is None else tensor.dtype


def _pack_parts(tensor: RawTensor, pool: ThreadPool, source: str, out: Bytes) -> None:
    """Pack a converted tensor some rows at a time, so that a large table is not in memory twice."""
    rows, cols = tensor.shape
    step = max(_FLOATS_AT_ONCE // cols // 16, 1) * 16  # blocks of the layout have 16 rows
    block_bytes = out.size // -(-rows // 16)
    for begin in range(0, rows, step):
        chosen = np.arange(begin, min(begin + step, rows))
        part = tensor if isinstance(tensor, Tensor) and step >= rows else tensor.take_rows(chosen)
        if isinstance(part, Tensor) and part.dtype == source:
            data = part.data
        else:
            data = np.ascontiguousarray(part.float32()).view(np.uint8)
        blocks = out[begin // 16 * block_bytes :][: -(-len(chosen) // 16) * block_bytes]
        pack_rows(pool, source, data, cols, blocks)


LAYOUT = 6  # version of packed files; raise it when csrc/matrix.h or the packed values change

_MAGIC = b"HSPACKED"
_PREFIX = struct.Struct("<8sII")  # magic, bytes and crc32 of the header
_PAGE = 4096
_MAX_FILES, _MAX_BYTES = 8, 16 << 30
_STALE_SECONDS = 3600


@dataclass(frozen=True)
class Key:
    """Identity of a packed file."""

    place: str  # file name: hash of the checkpoint's paths and quantization; a changed checkpoint replaces its file
    version: str  # JSON of layout, package version, quantization and file stamps


def key_of(files: Sequence[Path], quantization: str | None) -> Key | None:
    """The key of a checkpoint's files (trunk and head), or None if one cannot be read."""
    try:
        stamps = hub.file_stamps(files)
    except OSError:
        return None
    place = hashlib.sha256(json.dumps([[path for path, _, _ in stamps], quantization]).encode()).hexdigest()[:32]
    return Key(place, json.dumps([LAYOUT, __version__, quantization, stamps]))


@dataclass(frozen=True)
class _Entry:
    """One matrix in the file: its layout (see Matrix), position and checksum."""

    kind: int
    rows: int
    cols: int
    group: int
    zero: int
    scales: int
    offsets: int
    levels: int
    offset: int  # of the data in the file, bytes
    num_bytes: int
    crc: int  # crc32 of both ends of the data

    def matrix(self, file: Bytes) -> Matrix | None:
        """The matrix over the mapped file's bytes; None if they are damaged."""
        data = file[self.offset : self.offset + self.num_bytes]
        if ends_crc(data) != self.crc:
            return None
        layout = (self.kind, self.rows, self.cols, self.group, self.zero, self.scales, self.offsets)
        return Matrix(*layout, data, self.levels)


@dataclass
class PackedCache:
    """Packed matrices of one checkpoint: those in its file and those added by `put`."""

    path: Path | None
    key: Key | None
    _mapped: Bytes | None = None
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _new: dict[str, Matrix] = field(default_factory=dict)

    @classmethod
    def open(cls, key: Key | None) -> "PackedCache":
        """Open a checkpoint's cache; empty without a valid file. Without a key nothing is cached."""
        path = hub.cache_dir() / "packed" / f"{key.place}.pack" if key else None
        cache = cls(path, key)
        if path and key:
            with suppress(OSError, ValueError, KeyError, TypeError, struct.error):
                cache._mapped, cache._entries = _read(path, key)
                os.utime(path)  # the least recently used file is deleted first
        return cache

    def get(self, tensor: RawTensor) -> Matrix | None:
        """The packed matrix of a tensor [rows, cols] from the mapped file, or None."""
        entry = self._entries.get(_identity(tensor))
        return entry.matrix(self._mapped) if entry and self._mapped is not None else None

    def put(self, tensor: RawTensor, matrix: Matrix) -> Matrix:
        """Keep a matrix for `save`; returns it."""
        if self.path:
            self._new[_identity(tensor)] = matrix
        return matrix

    def save(self) -> bool:
        """Rewrite the file with old and new matrices, if there are new ones. Returns whether it was written."""
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
    """Name, type, shape and fingerprint of a tensor (slices share their tensor's name)."""
    return f"{tensor.name} {tensor.dtype} {list(tensor.shape)} {tensor.fingerprint():08x}"


def _read(path: Path, key: Key) -> tuple[Bytes, dict[str, _Entry]]:
    """Map a file: (bytes, entries). Raises ValueError, KeyError, TypeError, struct.error or OSError."""
    mapped = np.asarray(np.memmap(path, np.uint8, "r"))
    magic, length, crc = _PREFIX.unpack(mapped[: _PREFIX.size].tobytes())
    header = mapped[_PREFIX.size : _PREFIX.size + length].tobytes()
    if magic != _MAGIC or zlib.crc32(header) != crc:
        raise ValueError("damaged")
    document = json.loads(header)
    if document["key"] != key.version or document["size"] != mapped.size:
        raise ValueError("of another checkpoint or version, or cut off")
    return mapped, {name: _Entry(*entry) for name, entry in document["entries"].items()}


def _write(path: Path, key: Key, matrices: dict[str, Matrix]) -> None:
    """Write a temporary file, then rename it: readers keep the old file, concurrent writers do not collide."""
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
            os.fsync(file.fileno())  # else a crash could leave a file with holes
            Path(file.name).replace(path)
        finally:
            Path(file.name).unlink(missing_ok=True)


def _header(key: Key, matrices: dict[str, Matrix]) -> tuple[bytes, int]:
    """(header without its prefix, offset of the first matrix)."""
    entries, at = {}, 0
    for name, m in matrices.items():
        layout = (m.kind, m.rows, m.cols, m.group, m.zero, m.scales, m.offsets, m.levels)
        entries[name] = _Entry(*layout, at, m.num_bytes, ends_crc(m.data))
        at += _page_up(m.num_bytes)

    def text(start: int) -> bytes:
        rows = {name: astuple(replace(entry, offset=start + entry.offset)) for name, entry in entries.items()}
        return json.dumps({"key": key.version, "size": start + at, "entries": rows}).encode()

    start = _page_up(_PREFIX.size + len(text(1 << 40)))  # no offset has more digits
    return text(start), start


def _page_up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _budget(folder: Path) -> int:
    """Bytes that all packed files together may take: a quarter of the free disk space, theirs included."""
    own = sum(file.stat().st_size for file in folder.glob("*.pack"))
    return min(_MAX_BYTES, (shutil.disk_usage(folder).free + own) // 4)


def _prune(folder: Path) -> None:
    """Delete the oldest files beyond the limits, and temporary files of dead writers."""
    newest = sorted(folder.glob("*.pack"), key=lambda file: file.stat().st_mtime, reverse=True)
    bytes_left = _budget(folder)
    for place, file in enumerate(newest):
        bytes_left -= file.stat().st_size
        if place >= _MAX_FILES or bytes_left < 0:
            file.unlink(missing_ok=True)
    for file in folder.glob(".*.tmp"):
        if file.stat().st_mtime < time.time() - _STALE_SECONDS:
            file.unlink(missing_ok=True)
