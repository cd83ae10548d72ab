"""Safetensors files larger than memory: tensors by their place in a file, copied and written piece by piece.

Nothing is mapped while reading values, so the process never holds more than a piece.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats._header import PREFIX, header_size, parse_header
from headstart.formats._index import INDEX, missing_shard, weight_map_of
from headstart.formats._json import read_object
from headstart.formats._mmap import map_file
from headstart.formats.base import ITEM_BYTES, Bytes

PIECE_BYTES = 1 << 22


@dataclass(frozen=True)
class Stored:
    """One tensor of a safetensors file, by its place. `dtype` is a key of ITEM_BYTES; `begin` counts from the file's
    first byte."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    nbytes: int

    def read(self, begin: int, nbytes: int) -> Bytes:
        """Bytes [begin, begin + nbytes) of the tensor, uint8. ModelError when the file has become shorter."""
        with self.file.open("rb") as file:
            file.seek(self.begin + begin)
            data = file.read(nbytes)
        if len(data) != nbytes:
            raise ModelError(f"{self.file} ends inside tensor {self.name}", "was the file changed meanwhile?")
        return np.frombuffer(data, np.uint8)

    def pieces(self) -> Iterator[Bytes]:
        """All bytes, a piece at a time."""
        for begin in range(0, self.nbytes, PIECE_BYTES):
            yield self.read(begin, min(PIECE_BYTES, self.nbytes - begin))


def locate(path: Path) -> dict[str, Stored]:
    """The tensors of one file by name, from its header alone. ModelError for anything out of bounds."""
    raw = map_file(path)
    size = header_size(raw[:PREFIX].tobytes(), len(raw), str(path))
    entries, _ = parse_header(raw[PREFIX : PREFIX + size].tobytes(), len(raw), str(path))
    if unknown := next((name for name, entry in entries.items() if entry.dtype not in ITEM_BYTES), None):
        raise ModelError(f"{path}: tensor {unknown} has dtype {entries[unknown].dtype}, which cannot be exported")
    return {
        name: Stored(name, entry.dtype, entry.shape, path, entry.begin, entry.nbytes) for name, entry in entries.items()
    }


def locate_all(folder: Path) -> dict[str, Stored]:
    """The tensors of a checkpoint directory, those of files that the index does not name included: heads are often
    added so. ModelError for a missing shard, an index that names an absent tensor, or a tensor in two files."""
    has_index = (folder / INDEX).exists()
    index = weight_map_of(read_object(folder / INDEX), str(folder / INDEX)) if has_index else {}
    if missing := next((file for file in sorted(set(index.values())) if not (folder / file).exists()), None):
        raise missing_shard(str(folder / INDEX), missing)
    tensors: dict[str, Stored] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, stored in locate(file).items():
            if index.get(name, file.name) != file.name:
                continue
            if name in tensors:
                raise ModelError(f"tensor {name} is in {file} and in {tensors[name].file.name}", "keep one of them")
            tensors[name] = stored
    if absent := next((name for name in index if name not in tensors), None):
        hint = "the file is damaged or its download is incomplete: download it again"
        raise ModelError(f"{folder / INDEX} says tensor {absent} is in {index[absent]}, but it is not", hint)
    if not tensors:
        raise ModelError(f"{folder} holds no tensors in *.safetensors files", "give a Hugging Face directory")
    return tensors


@dataclass(frozen=True)
class Planned:
    """A tensor to be written. `pieces` yields arrays that hold its little-endian bytes in order, when it is written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def copied(name: str, stored: Stored) -> Planned:
    """The same bytes under another name."""
    return Planned(name, stored.dtype, stored.shape, stored.pieces)


def write_stream(
    path: Path,
    tensors: Sequence[Planned],
    metadata: Mapping[str, str] | None = None,
    wrote: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write one safetensors file. `wrote` is called with the bytes of each piece."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # Widest types first: every tensor then starts at a multiple of its own item size.
    order = sorted(tensors, key=lambda each: (-ITEM_BYTES[each.dtype], each.name))
    at = 0
    for each in order:
        header[each.name] = {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": [at, at + each.nbytes]}
        at += each.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for each in order:
            done = 0
            for piece in each.pieces():
                data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
                file.write(data)
                done += len(data)
                wrote(len(data))
            assert done == each.nbytes, f"{each.name}: {done} bytes written, {each.nbytes} planned"
