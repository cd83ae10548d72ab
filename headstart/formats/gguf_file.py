"""Parses a GGUF file: header, metadata, tensor table. Every number is checked against the file's size.

No tensor data is read, so the first bytes of a remote file suffice.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headstart.core import Bytes
from headstart.errors import ModelError
from headstart.formats.base import File, Tensor, map_file
from headstart.formats.safetensors_file import AGAIN
from headstart.placeholder import FIRST_BYTES, placeholder_error

MAGIC = b"GGUF"
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 8
BLOCKS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 28: ("F64", 1, 8),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 22: ("IQ2_S", 256, 82), 18: ("IQ3_XXS", 256, 98),
    21: ("IQ3_S", 256, 110), 19: ("IQ1_S", 256, 50), 29: ("IQ1_M", 256, 56), 20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
}  # fmt: skip
"""Number of a ggml type -> its name, elements of a block, bytes of a block. Importing these from gguf takes 50 ms."""
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class GgufFile:
    """Metadata (strings, numbers, lists of strings, numpy arrays of numbers), and tensors by the file's names."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


_SIZE = struct.Struct("<Q")


class IncompleteHeader(Exception):
    """The header is longer than the given piece of the file."""


class _Cursor:
    """Reads values from `raw`, a file's first bytes. Raises IncompleteHeader at its end, ModelError at the file's."""

    def __init__(self, path: Path, raw: Bytes, size: int) -> None:
        self.path, self.raw, self.view, self.size, self.at = path, raw, raw.data, size, 0

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}", AGAIN)

    def skip(self, count: int) -> int:
        begin = self.at
        if count > self.size - begin:
            raise self.fail(f"the file ends at byte {self.size}, but {count} bytes are wanted at byte {begin}")
        if count > len(self.raw) - begin:
            raise IncompleteHeader
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
        """`count` strings. A vocabulary has hundreds of thousands, so they are read from pieces of the file in a loop
        without calls; only a string that crosses the end of a piece is read with `text`."""
        self.plausible(count, 8, "strings")
        found, sized = list[str](), _SIZE.unpack_from
        while len(found) < count:
            piece, at = bytes(self.view[self.at : self.at + _PIECE_BYTES]), 0
            end, last = len(piece), len(piece) - 8
            for _ in range(count - len(found)):
                if at > last:
                    break
                begin = at + 8
                stop = begin + sized(piece, at)[0]
                if stop > end:
                    break
                found.append(piece[begin:stop].decode("utf-8", "replace"))
                at = stop
            self.at += at
            if len(found) < count:
                found.append(self.text())
        return found

    def plausible(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self.size - self.at:
            raise self.fail(f"the file ends before its {count} {what}: it has {self.size} bytes")


def read(path: Path) -> GgufFile:
    """Parse one GGUF file (version 2 or 3, little-endian). Raises ModelError for other or damaged files."""
    raw = map_file(path)
    return parse(File(path), raw, len(raw))


def parse(file: File, raw: Bytes, size: int) -> GgufFile:
    """Parse `raw`, the first bytes of a file of `size` bytes. Of a remote file, tensors beyond `raw` cannot be read.
    Raises IncompleteHeader if `raw` ends inside the header, ModelError as `read`."""
    cursor = _Cursor(file.path, raw, size)
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
    return GgufFile(file.path, metadata, _tensors(cursor, file, table, metadata.get("general.alignment", 32)))


def written_number(value: Any) -> Any:
    """The number that a float32 of the metadata was written as; other values as they are."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _check_version(cursor: _Cursor) -> None:
    if len(cursor.raw) < len(MAGIC) or bytes(cursor.view[:4]) != MAGIC:
        if error := placeholder_error(cursor.path, bytes(cursor.view[:FIRST_BYTES]), cursor.size):
            raise error
        raise cursor.fail("not a GGUF file: it does not start with 'GGUF'")
    cursor.skip(4)
    version = cursor.scalar("<I")
    if version & 0xFFFF == 0 and version:
        raise ModelError(f"{cursor.path} is a big-endian GGUF file", "use the little-endian file of this model")
    if version not in (2, 3):
        raise ModelError(f"{cursor.path} is GGUF version {version}, but 2 and 3 are known", "convert the model again")


def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's name, shape (Hugging Face order), number of its ggml type, and offset."""
    name, num_dims = cursor.text(), cursor.scalar("<I")
    if not 0 < num_dims <= _MAX_DIMS:
        raise cursor.fail(f"tensor {name} has {num_dims} dimensions")
    dims = tuple(cursor.scalar("<Q") for _ in range(num_dims))
    return name, dims[::-1], cursor.scalar("<I"), cursor.scalar("<Q")


def _tensors(
    cursor: _Cursor, file: File, table: list[tuple[str, tuple[int, ...], int, int]], align: object
) -> dict[str, Tensor]:
    if not isinstance(align, int) or align <= 0 or align & (align - 1):
        raise cursor.fail(f"general.alignment is {align}, but must be a power of two")
    start = -(-cursor.at // align) * align
    tensors: dict[str, Tensor] = {}
    entries = [(name, shape, *_size(cursor, name, shape, kind), start + offset) for name, shape, kind, offset in table]
    needed = max((begin + size for *_, size, begin in entries), default=0)
    if needed > cursor.size:
        raise cursor.fail(f"the file has {cursor.size} bytes, but its tensors need {needed}")
    for name, shape, dtype, size, begin in entries:
        if name in tensors:
            raise cursor.fail(f"tensor {name} appears twice")
        seen = not file.here and begin + size <= len(cursor.raw)
        tensors[name] = Tensor(name, shape, dtype, cursor.raw if seen else file, begin, size)
    return tensors


def _size(cursor: _Cursor, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
    """Type name and bytes of a tensor. Raises ModelError for an unknown type and for rows that are not whole blocks."""
    if kind not in BLOCKS:
        hint = "convert the file to a usual quantization, such as Q8_0 or Q4_K_M"
        raise ModelError(f"{cursor.path}: tensor {name} has the unknown ggml type {kind}", hint)
    dtype, block, size = BLOCKS[kind]
    if shape[-1] % block:
        raise cursor.fail(f"tensor {name} of type {dtype} has the shape {list(shape)} (blocks of {block})")
    return dtype, math.prod(shape) // block * size
