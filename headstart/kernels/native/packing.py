"""Packs a file's weights for the native kernels (csrc/matrix.h), and caches packed weights in files."""

import hashlib
import json
import os
import shutil
import struct
import tempfile
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headstart import hub
from headstart.config import Quantization
from headstart.core import Bytes
from headstart.errors import CapacityError, ModelError
from headstart.formats.base import Tensor, ends_crc
from headstart.kernels.native._native import Matrix, ThreadPool, dequantize_into, matrix_bytes, pack_rows, source_form
from headstart.kernels.ops import RawTensor
from headstart.version import __version__
from headstart.wording import option

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
_STREAM_HEADER, _WINDOW = 64 << 20, 1 << 30
"""Room for the header of a file whose number of matrices is unknown (a hole takes no disk), and bytes of a mapping."""
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


@dataclass(frozen=True)
class MappedFile:
    """A mapped file. Reading a page beyond the end of a file that was cut would kill the process."""

    path: Path
    data: Bytes
    descriptor: int

    @classmethod
    def open(cls, path: Path, offset: int = 0) -> "MappedFile":
        """Map a file from `offset` on. Raises OSError or ValueError."""
        mapped = cls(path, np.asarray(np.memmap(path, np.uint8, "r", offset)), os.open(path, os.O_RDONLY))
        weakref.finalize(mapped, os.close, mapped.descriptor)
        return mapped

    def check(self, end: int) -> None:
        """Raises ModelError if the file was cut before byte `end`. A deleted file stays readable."""
        if (size := os.fstat(self.descriptor).st_size) < end:
            what = f"{self.path} was cut to {size} bytes while its weights were in use"
            raise ModelError(what, "start again: the weights are packed anew")


@dataclass
class PackedCache:
    """Packed matrices of one checkpoint: those in its file and those added by `put`.

    in_file: the matrices exceed the memory, so `put` writes each one to the file at once and returns it mapped.
    """

    path: Path | None
    key: Key | None
    in_file: bool = False
    mapped_bytes: int = 0  # of matrices that are read from the file
    _mapped: MappedFile | None = None
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _new: dict[str, Matrix] = field(default_factory=dict)
    _writer: "_Writer | None" = None

    @classmethod
    def open(cls, key: Key | None, *, in_file: bool = False) -> "PackedCache":
        """Open a checkpoint's cache; empty without a valid file. Without a key nothing is cached."""
        path = hub.cache_dir() / "packed" / f"{key.place}.pack" if key else None
        cache = cls(path, key, in_file and path is not None)
        if path and key:
            with suppress(OSError, ValueError, KeyError, TypeError, struct.error):
                cache._mapped, cache._entries = _read(path, key)
                os.utime(path)  # the least recently used file is deleted first
        return cache

    def get(self, tensor: RawTensor) -> Matrix | None:
        """The packed matrix of a tensor [rows, cols] from the mapped file, or None."""
        entry = self._entries.get(_identity(tensor))
        matrix = entry.matrix(self._mapped.data) if entry and self._mapped is not None else None
        self.mapped_bytes += matrix.num_bytes if matrix else 0
        return matrix

    def put(self, tensor: RawTensor, matrix: Matrix) -> Matrix:
        """Keep a matrix for `save`; returns it. Raises CapacityError if it fits neither the memory nor the disk."""
        if self.in_file and not self._entries:  # a written file is not extended: other matrices stay in memory
            return self._put_in_file(_identity(tensor), matrix)
        if self.path:
            self._new[_identity(tensor)] = matrix
        return matrix

    def _put_in_file(self, name: str, matrix: Matrix) -> Matrix:
        assert self.path is not None
        try:
            if self._writer is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._writer = _Writer(self.path.parent, _STREAM_HEADER)
            entry = self._writer.add(name, matrix)
            self.mapped_bytes += entry.num_bytes
            return self._writer.map(entry)
        except OSError as error:
            what = f"the packed weights do not fit into memory, and not into {self.path.parent} either: {error}"
            raise CapacityError(what, "free disk space, or round them: " + option("quantization", "int4")) from None

    def save(self) -> bool:
        """Rewrite the file with old and new matrices, if there are new ones. Returns whether it was written."""
        new, self._new = self._new, {}
        if not self.path or not self.key or not (new or self._writer):
            return False
        with suppress(OSError):
            if self._writer:
                writer, self._writer = self._writer, None
                self._mapped, self._entries = writer.finish(self.key, self.path)
                _prune(self.path.parent)
                return True
            mapped = self._mapped.data if self._mapped else np.empty(0, np.uint8)
            old = {name: entry.matrix(mapped) for name, entry in self._entries.items()}
            matrices = {name: matrix for name, matrix in (old | new).items() if matrix}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if sum(matrix.num_bytes + _PAGE for matrix in matrices.values()) <= _budget(self.path.parent):
                _write(self.path, self.key, matrices)
                _prune(self.path.parent)
                return self.path.exists()
        return False

    def check(self) -> None:
        """Raises ModelError if the file with matrices in use was cut."""
        if self._mapped is not None and self.mapped_bytes:
            self._mapped.check(self._mapped.data.size)


def _identity(tensor: RawTensor) -> str:
    """Name, type, shape and fingerprint of a tensor (slices share their tensor's name)."""
    return f"{tensor.name} {tensor.dtype} {list(tensor.shape)} {tensor.fingerprint():08x}"


def _read(path: Path, key: Key) -> tuple[MappedFile, dict[str, _Entry]]:
    """Map a file: (file, entries). Raises ValueError, KeyError, TypeError, struct.error or OSError."""
    file = MappedFile.open(path)
    magic, length, crc = _PREFIX.unpack(file.data[: _PREFIX.size].tobytes())
    header = file.data[_PREFIX.size : _PREFIX.size + length].tobytes()
    if magic != _MAGIC or zlib.crc32(header) != crc:
        raise ValueError("damaged")
    document = json.loads(header)
    if document["key"] != key.version or document["size"] != file.data.size:
        raise ValueError("of another checkpoint or version, or cut off")
    return file, {name: _Entry(*entry) for name, entry in document["entries"].items()}


class _Writer:
    """Appends matrices to a temporary file after room for a header. `finish` writes the header and renames the file:
    readers keep the old one, concurrent writers do not collide."""

    def __init__(self, folder: Path, start: int) -> None:
        self.path = Path(tempfile.mkstemp(dir=folder, prefix=".", suffix=".tmp")[1])
        self._file = self.path.open("r+b", buffering=0)
        self._start = self._end = start
        self._entries: dict[str, _Entry] = {}
        self._window: tuple[int, Bytes] = (0, np.empty(0, np.uint8))
        weakref.finalize(self, self.path.unlink, missing_ok=True)
        weakref.finalize(self, self._file.close)

    def add(self, name: str, matrix: Matrix) -> _Entry:
        layout = (matrix.kind, matrix.rows, matrix.cols, matrix.group, matrix.zero, matrix.scales, matrix.offsets)
        entry = _Entry(*layout, matrix.levels, self._end, matrix.num_bytes, ends_crc(matrix.data))
        self._file.seek(self._end)
        left = matrix.data.data
        while left:  # a write takes 2 GiB at most
            left = left[self._file.write(left) :]
        self._entries[name], self._end = entry, self._end + _page_up(entry.num_bytes)
        return entry

    def map(self, entry: _Entry) -> Matrix:
        """The matrix of an added entry, read from the file. Files are mapped some matrices at a time: the system limits
        the number of mappings."""
        begin, mapped = self._window
        if entry.offset + entry.num_bytes > begin + mapped.size:
            size = max(_WINDOW, entry.num_bytes)
            self._file.truncate(entry.offset + size)
            mapped = np.asarray(np.memmap(self.path, np.uint8, "r", entry.offset, (size,)))
            self._window = begin, _ = entry.offset, mapped
        matrix = replace(entry, offset=entry.offset - begin).matrix(mapped)
        assert matrix is not None, "the file has what was written"
        return matrix

    def finish(self, key: Key, path: Path) -> tuple[MappedFile, dict[str, _Entry]]:
        entries = {name: astuple(entry) for name, entry in self._entries.items()}
        header = json.dumps({"key": key.version, "size": self._end, "entries": entries}).encode()
        assert _PREFIX.size + len(header) <= self._start, "the header has room"
        self._file.seek(0)
        self._file.write(_PREFIX.pack(_MAGIC, len(header), zlib.crc32(header)) + header)
        self._file.truncate(self._end)
        os.fsync(self._file.fileno())  # else a crash could leave a file with holes
        self.path.replace(path)
        return MappedFile.open(path), self._entries


def _write(path: Path, key: Key, matrices: dict[str, Matrix]) -> None:
    """Write a file with these matrices."""
    writer = _Writer(path.parent, _page_up(len(json.dumps([key.version, *matrices])) + 160 * len(matrices) + _PAGE))
    for name, matrix in matrices.items():
        writer.add(name, matrix)
    writer.finish(key, path)


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
        if place and (place >= _MAX_FILES or bytes_left < 0):  # the newest was just written
            file.unlink(missing_ok=True)
    for file in folder.glob(".*.tmp"):
        if file.stat().st_mtime < time.time() - _STALE_SECONDS:
            file.unlink(missing_ok=True)
