"""Reads Hugging Face directories (config.json and *.safetensors files), and writes safetensors files."""

import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.files import write_atomic_chunks
from headstart.formats import safetensors_file
from headstart.formats.base import ITEM_BYTES, NAME_OF, Checkpoint, Format, Tensor, text_readers
from headstart.formats.json_object import read_object
from headstart.formats.sizes import Sizes
from headstart.formats.tensor_parts import MTP, part_of
from headstart.placeholder import partial_files

log = logging.getLogger("headstart.formats")
CONFIG, GENERATION = "config.json", "generation_config.json"
ADAPTER = "adapter_model.safetensors"  # of PEFT; some trainers write config.json beside it
Array = NDArray[Any] | tuple[NDArray[Any], str]
"""A numpy array, or the raw bits and the dtype's name for dtypes that numpy lacks: (uint16 array, "BF16")."""


def detect(path: Path) -> bool:
    """A directory with config.json and at least one safetensors file of a model (or their index)."""
    if not (path.is_dir() and (path / CONFIG).exists()):
        return False
    return (path / safetensors_file.INDEX).exists() or any(each.name != ADAPTER for each in path.glob("*.safetensors"))


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face directory. Tensor names are those of the model's Hugging Face implementation. Raises
    ModelError for damaged or missing files."""
    config, place = read_object(path / CONFIG), path / safetensors_file.INDEX
    index, where = read_object(place) if place.exists() else None, str(place)
    here = sorted(file.name for file in path.glob("*.safetensors"))
    if index is not None and safetensors_file.is_stale(here, index, where):
        ignored = "%s does not name %s in the same directory: that file is used and the index ignored"
        log.warning(ignored, place, safetensors_file.SINGLE)
        index = None
    own = [file for file in here if file != ADAPTER]
    files = safetensors_file.shards_of(own, index, where, partial_files(path))
    shards = {file: safetensors_file.read_file(path / file) for file in files}
    tensors = safetensors_file.tensors_of(shards, index, where, str(path))
    for file in set(here) - shards.keys():
        with suppress(ModelError):  # files that the index does not name may be anything
            shards[file] = safetensors_file.read_file(path / file)
    stray = {name: each for held in shards.values() for name, each in held.items() if name not in tensors}
    sidecar = sidecar_heads(tensors, stray, config)
    return Checkpoint(
        path=path,
        format="safetensors",
        config=config,
        tensors={**tensors, **sidecar},
        canonical_names=False,
        files=tuple(path / file for file in sorted({*files, *(each.file.name for each in sidecar.values())})),
        generation_config=read_object(path / GENERATION) if (path / GENERATION).exists() else {},
        stray=stray,
        **text_readers("from_directory", path),
    )


def sidecar_heads(
    tensors: Mapping[str, Tensor], stray: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Tensor]:
    """The MTP tensors among `stray`, as of mtp.safetensors; empty if `tensors` already has MTP tensors."""
    num_layers = Sizes(config).get("layers") or 0
    found = {name: each for name, each in stray.items() if part_of(name, num_layers) == MTP}
    return {} if found and any(part_of(name, num_layers) == MTP for name in tensors) else found


def whole_directory(path: Path) -> dict[str, Tensor]:
    """The tensors of all files of a directory, also of files that the index does not name (added heads). Files are not
    mapped, so that only a piece is in memory at a time. Raises ModelError for a missing shard, an index that names a
    missing tensor, or a tensor in two files."""
    files = {file.name: safetensors_file.read_file(file, mapped=False) for file in sorted(path.glob("*.safetensors"))}
    if not any(files.values()):
        raise ModelError(f"{path} holds no tensors in *.safetensors files", "give a Hugging Face directory")
    weight_map: dict[str, str] = {}
    if (place := path / safetensors_file.INDEX).exists():
        index, where = read_object(place), str(place)
        safetensors_file.shards_of(files, index, where)
        weight_map = safetensors_file.weight_map_of(index, where)
        safetensors_file.pick(weight_map, files, where)
    for file, held in files.items():
        files[file] = {name: each for name, each in held.items() if weight_map.get(name, file) == file}
    return safetensors_file.join(files, str(path))


@dataclass(frozen=True)
class Planned:
    """A tensor to be written. `pieces`, called while writing, yields arrays of its little-endian bytes in order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[NDArray[Any]]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def copied(name: str, tensor: Tensor) -> Planned:
    """A plan that copies a tensor's bytes under the name `name`. Raises ModelError for a dtype outside ITEM_BYTES."""
    if tensor.dtype not in ITEM_BYTES:
        raise ModelError(f"{tensor.file}: tensor {tensor.name} has dtype {tensor.dtype}, which cannot be exported")
    return Planned(name, tensor.dtype, tensor.shape, tensor.pieces)


def write_stream(
    path: Path, tensors: Sequence[Planned], metadata: Mapping[str, str] | None = None,
    wrote: Callable[[int], None] = lambda nbytes: None,
) -> None:  # fmt: skip
    """Write one new safetensors file, piece by piece. `wrote` is called with the number of bytes of each piece."""
    with path.open("xb") as file:
        for piece in _stream(tensors, metadata, wrote):
            file.write(piece)


def _stream(
    tensors: Sequence[Planned], metadata: Mapping[str, str] | None, wrote: Callable[[int], None] = lambda nbytes: None
) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file: its header, then the tensors' pieces."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # widest dtypes first, so that every tensor starts at a multiple of its item size
    order = sorted(tensors, key=lambda each: (-ITEM_BYTES[each.dtype], each.name))
    at = 0
    for each in order:
        header[each.name] = {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": [at, at + each.nbytes]}
        at += each.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for each in order:
        done = 0
        for piece in each.pieces():
            data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
            yield data
            done += len(data)
            wrote(len(data))
        assert done == each.nbytes, f"{each.name}: {done} bytes written, {each.nbytes} planned"


def save(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file atomically. Raises ModelError for a numpy dtype without a safetensors dtype."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic_chunks(path, _stream([_planned(name, value) for name, value in tensors.items()], metadata))


def _planned(name: str, value: Array) -> Planned:
    bits, dtype = value if isinstance(value, tuple) else (value, NAME_OF.get(value.dtype.newbyteorder("<")))
    if dtype is None or ITEM_BYTES.get(dtype) != bits.itemsize:
        raise ModelError(f"tensor {name} of numpy type {bits.dtype} cannot be saved as {dtype}")
    little = np.ascontiguousarray(bits, bits.dtype.newbyteorder("<"))
    return Planned(name, dtype, bits.shape, lambda: [little])


def bfloat16(values: NDArray[np.float32]) -> tuple[NDArray[np.uint16], str]:
    """Finite float32 values rounded to the nearest bfloat16, ties to even, as an Array for `save`."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16), "BF16"


FORMAT = Format(detect, open_checkpoint)
