"""The container of a GGUF file: header, metadata, tensor table. Every number is checked against the file's size.

Nothing but the header is read, so the first bytes of a remote file will do.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headstart.errors import ModelError
from headstart.formats.base import ITEM_BYTES, Bytes, File, Tensor, map_file
from headstart.formats.safetensors_file import AGAIN

MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 8


@dataclass(frozen=True, eq=False)
class GgufFile:
    """Metadata (strings, numbers, lists of strings, numpy arrays of numbers) and tensors under the file's names."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


_SIZE = struct.Struct("<Q")


class MoreNeeded(Exception):
    """The header goes on after the piece of the file that was given."""


class _Cursor:
    """Reads little-endian values from the first bytes of a file of `size` bytes, never past their end."""

    def __init__(self, path: Path, raw: Bytes, size: int) -> None:
        self.path, self.raw, self.view, self.size, self.at = path, raw, raw.data, size, 0

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}", AGAIN)

    def skip(self, count: int) -> int:
        begin = self.at
        if count > self.size - begin:
            raise self.fail(f"the file ends at byte {self.size}, but {count} bytes are wanted at byte {begin}")
        if count > len(self.raw) - begin:
            raise MoreNeeded
        self.at += count
        return begin

    def scalar(self, code: str) -> Any:
        return struct.unpack_from(code, self.view, self.skip(struct.calcsize(code)))[0]

    def text(self) -> str:
        size = self.scalar("<Q")
        begin = self.skip(size)
        return bytes(self.view[begin : begin + size]).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise self.fail(f"metadata of the unknown type {kind}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> Any:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _STRING:
            return self.texts(count)
        if kind not in _SCALARS:
            raise self.fail(f"a metadata array of the unknown type {kind}")
        dtype = np.dtype(np.bool_ if kind == 7 else _SCALARS[kind])
        begin = self.skip(count * dtype.itemsize)
        return self.raw[begin : self.at].view(dtype).copy()

    def texts(self, count: int) -> list[str]:
        """A vocabulary has hundreds of thousands: no call for each of them but where something is wrong."""
        self.plausible(count, 8, "strings")
        found, view, at, end = list[str](), self.view, self.at, len(self.raw) - 8
        while len(found) < count and at <= end:
            begin = at + 8
            stop = begin + _SIZE.unpack_from(view, at)[0]
            if stop > end + 8:
                break
            found.append(str(view[begin:stop], "utf-8", "replace"))
            at = stop
        self.at = at
        return found + [self.text() for _ in range(count - len(found))]

    def plausible(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self.size - self.at:
            raise self.fail(f"the file claims {count} {what}, more than it has room for")


def read(path: Path) -> GgufFile:
    """Parse one GGUF file (versions 2 and 3, little-endian). ModelError for anything else or out of bounds."""
    raw = map_file(path)
    return parse(path, raw, len(raw))


def parse(path: Path, raw: Bytes, size: int) -> GgufFile:
    """Parse the first bytes of a file of `size` bytes; tensors whose bytes are not among them cannot be read. Raises
    MoreNeeded when the header goes on, ModelError as `read`."""
    cursor = _Cursor(path, raw, size)
    _check_version(cursor)
    num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
    cursor.plausible(num_keys, 13, "metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.text()
        if key in metadata:
            raise cursor.fail(f"the metadata key {key} appears twice")
        metadata[key] = cursor.value(cursor.scalar("<I"))
    cursor.plausible(num_tensors, 24, "tensors")
    table = [_entry(cursor) for _ in range(num_tensors)]
    return GgufFile(path, metadata, _tensors(cursor, table, metadata.get("general.alignment", 32)))


def _check_version(cursor: _Cursor) -> None:
    if len(cursor.raw) < len(MAGIC) or bytes(cursor.view[:4]) != MAGIC:
        raise cursor.fail("not a GGUF file: it does not start with 'GGUF'")
    cursor.skip(4)
    version = cursor.scalar("<I")
    if version & 0xFFFF == 0 and version:
        raise ModelError(f"{cursor.path} is a big-endian GGUF file", "use the little-endian file of this model")
    if version not in (2, 3):
        raise ModelError(f"{cursor.path} is GGUF version {version}, but 2 and 3 are known", "convert the model again")


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """name, shape (Hugging Face order), ggml type, offset."""
    name, num_dims = cursor.text(), cursor.scalar("<I")
    if not 0 < num_dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {name} has {num_dims} dimensions")
    dims = tuple(cursor.scalar("<Q") for _ in range(num_dims))
    return name, dims[::-1], cursor.scalar("<I"), cursor.scalar("<Q")


def _tensors(cursor: _Cursor, table: list[tuple[str, tuple[int, ...], int, int]], align: object) -> dict[str, Tensor]:
    if not isinstance(align, int) or align <= 0 or align & (align - 1):
        raise cursor.fail(f"general.alignment is {align}, but must be a power of two")
    start = -(-cursor.at // align) * align
    tensors: dict[str, Tensor] = {}
    file = File(cursor.path, here=len(cursor.raw) == cursor.size)
    for name, shape, kind, offset in table:
        dtype, size = _size(cursor, name, shape, kind)
        begin = start + offset
        if begin + size > cursor.size:
            raise cursor.fail(f"tensor {name} lies at bytes {begin}..{begin + size} of {cursor.size}")
        if name in tensors:
            raise cursor.fail(f"tensor {name} appears twice")
        seen = not file.here and begin + size <= len(cursor.raw)
        tensors[name] = Tensor(name, shape, dtype, cursor.raw if seen else file, begin, size)
    return tensors


def _size(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
    """Type name and bytes of a tensor; a row must be a whole number of blocks."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # slow to import, and many are not GGUF

    try:
        ggml = GGMLQuantizationType(kind)
    except ValueError as error:
        hint = "convert the file to a usual quantization, such as Q8_0 or Q4_K_M"
        raise ModelError(f"{cursor.path}: tensor {name} has the unknown ggml type {kind}", hint) from error
    block, size = GGML_QUANT_SIZES[ggml]
    if shape[-1] % block:
        raise cursor.fail(f"tensor {name} of type {ggml.name} has the shape {list(shape)} (blocks of {block})")
    assert ggml.name not in ITEM_BYTES or ITEM_BYTES[ggml.name] == size
    return ggml.name, math.prod(shape) // block * size
