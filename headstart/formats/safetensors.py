"""Hugging Face directories: config.json and one or many *.safetensors files.

The header is parsed here, over the mapped file, with every number checked against the file's size.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats._json import parse_object, read_object
from headstart.formats._mmap import map_file
from headstart.formats.base import ITEM_BYTES, NAME_OF, Bytes, Checkpoint, Format, Tensor, make_tensor, plain_nbytes
from headstart.text.chat import ChatTemplate
from headstart.text.tokenizer import Tokenizer

MAX_HEADER = 100_000_000
_AGAIN = "the file is damaged or its download is incomplete: download it again"
_INDEX = "model.safetensors.index.json"

Array = NDArray[Any] | tuple[NDArray[Any], str]
"""A numpy array, or raw bits with a dtype name for what numpy lacks: (uint16 array, "BF16")."""


def detect(path: Path) -> bool:
    """A directory with config.json and at least one safetensors file (or their index)."""
    if not (path.is_dir() and (path / "config.json").exists()):
        return False
    return (path / _INDEX).exists() or any(path.glob("*.safetensors"))


def open_checkpoint(path: Path) -> Checkpoint:
    """Open such a directory. Tensor names are those of the model's Hugging Face implementation."""
    config = read_object(path / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path / 'config.json'} names no model_type", "is this a model directory?")
    generation = path / "generation_config.json"
    return Checkpoint(
        path=path,
        format="safetensors",
        config=config,
        tensors=_read_all(path),
        canonical_names=False,
        files=tuple(sorted(path.glob("*.safetensors"))),
        generation_config=read_object(generation) if generation.exists() else {},
        tokenizer=lambda: Tokenizer.from_directory(path),
        template=lambda: ChatTemplate.from_directory(path),
    )


def _read_all(path: Path) -> dict[str, Tensor]:
    index = path / _INDEX
    single = path / "model.safetensors"
    if index.exists():
        return _read_indexed(path, read_weight_map(path, read_object(index).get("weight_map")))
    files = [single] if single.exists() else sorted(path.glob("*.safetensors"))
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_file(file).items():
            if name in tensors:
                raise ModelError(f"tensor {name} is in {file} and in another file of {path}", "keep one of them")
            tensors[name] = tensor
    return tensors


def read_weight_map(path: Path, weight_map: object) -> dict[str, str]:
    """Tensor -> shard of a directory's index, checked: plain file names that exist. ModelError otherwise."""
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise ModelError(f"{path / _INDEX} has no weight_map from tensor names to file names", _AGAIN)
    for name in sorted(set(weight_map.values())):
        # A name with a directory part could point outside the checkpoint.
        if Path(name).name != name:
            raise ModelError(f"{path / _INDEX} names the shard {name!r}, which is not a plain file name")
        if not (path / name).exists():
            raise ModelError(f"{path / _INDEX} names the shard {name}, which is missing", "download the model again")
    return weight_map


def _read_indexed(path: Path, weight_map: dict[str, str]) -> dict[str, Tensor]:
    shards = {name: read_file(path / name) for name in sorted(set(weight_map.values()))}
    tensors: dict[str, Tensor] = {}
    for tensor, file in weight_map.items():
        if tensor not in shards[file]:
            raise ModelError(f"{path / _INDEX} says tensor {tensor} is in {file}, but it is not", _AGAIN)
        tensors[tensor] = shards[file][tensor]
    return tensors


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, by name. ModelError for anything out of bounds."""
    return _parse(path, map_file(path))[0]


def read_metadata(path: Path) -> dict[str, str]:
    """The `__metadata__` strings of one safetensors file."""
    return _parse(path, map_file(path))[1]


def _parse(path: Path, raw: Bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    placed, metadata, start = parse_header(path, raw)
    data = raw[start:]
    tensors = {
        name: make_tensor(name, shape, dtype, data[begin:end]) for name, (dtype, shape, begin, end) in placed.items()
    }
    return tensors, metadata


Placed = tuple[str, tuple[int, ...], int, int]
"""dtype, shape, begin and end of a tensor in the data that follows the header."""


def parse_header(path: Path, raw: Bytes) -> tuple[dict[str, Placed], dict[str, str], int]:
    """Tensors by name, the `__metadata__` strings, and where the data starts. ModelError for anything out of bounds."""
    size = int.from_bytes(raw[:8].tobytes(), "little")
    if len(raw) < 8 or size > len(raw) - 8:
        raise ModelError(f"{path} is {len(raw)} bytes long, too short for its header of {size} bytes", _AGAIN)
    if size > MAX_HEADER:
        raise ModelError(f"{path} claims a header of {size} bytes; more than {MAX_HEADER} is not accepted", _AGAIN)
    header = parse_object(raw[8 : 8 + size].tobytes(), f"the header of {path}")
    metadata = header.pop("__metadata__", None) or {}
    placed = {name: _place(path, name, entry, len(raw) - 8 - size) for name, entry in header.items()}
    _check_overlap(path, {name: (begin, end) for name, (_, _, begin, end) in placed.items()})
    strings = {str(key): str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}
    return placed, strings, 8 + size


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _place(path: Path, name: str, entry: object, num_bytes: int) -> Placed:
    """One header entry, checked."""
    if not isinstance(entry, dict):
        raise ModelError(f"{path}: the header entry of tensor {name} is not an object", _AGAIN)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ModelError(f"{path}: tensor {name} has dtype {dtype!r}", f"known are {', '.join(ITEM_BYTES)}")
    if not isinstance(shape, list) or len(shape) > 16 or not all(map(_is_size, shape)):
        raise ModelError(f"{path}: tensor {name} has the shape {shape!r}", _AGAIN)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ModelError(f"{path}: tensor {name} has the offsets {offsets!r}", _AGAIN)
    begin, end = offsets
    if begin > end or end > num_bytes:
        raise ModelError(f"{path}: tensor {name} lies at bytes {begin}..{end} of {num_bytes}", _AGAIN)
    if (wanted := plain_nbytes(tuple(shape), dtype)) != end - begin:
        raise ModelError(f"{path}: tensor {name} {dtype}{shape} needs {wanted} bytes, but has {end - begin}", _AGAIN)
    return dtype, tuple(shape), begin, end


def _check_overlap(path: Path, places: Mapping[str, tuple[int, int]]) -> None:
    last_name, last_end = "", 0
    for name, (begin, end) in sorted(places.items(), key=lambda item: item[1]):
        if begin < last_end and begin < end:
            raise ModelError(f"{path}: tensors {last_name} and {name} overlap", _AGAIN)
        if end > last_end:
            last_name, last_end = name, end


def save(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> None:
    """Write one safetensors file, whole or not at all (a temporary file, then a rename).

    BF16 goes in as (uint16 bits, "BF16"); any other value as a numpy array of a plain type.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    blobs: list[Bytes] = []
    # Widest types first: every tensor then starts at a multiple of its own item size.
    for name, value in sorted(tensors.items(), key=lambda item: (-_bits(item[1]).itemsize, item[0])):
        bits = _bits(value)
        bits = np.ascontiguousarray(bits, bits.dtype.newbyteorder("<")).reshape(bits.shape)
        begin = sum(map(len, blobs))
        blobs.append(bits.reshape(-1).view(np.uint8))
        header[name] = {
            "dtype": _dtype_name(name, value),
            "shape": list(bits.shape),
            "data_offsets": [begin, begin + len(blobs[-1])],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write_atomically(Path(path), [len(text).to_bytes(8, "little"), text, *(blob.data for blob in blobs)])


def bfloat16(values: NDArray[np.float32]) -> tuple[NDArray[np.uint16], str]:
    """Finite float32 numbers rounded to the nearest bfloat16, ties to even, as `save` takes them."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16), "BF16"


def _bits(value: Array) -> NDArray[Any]:
    return value[0] if isinstance(value, tuple) else value


def _dtype_name(name: str, value: Array) -> str:
    bits = _bits(value)
    given = value[1] if isinstance(value, tuple) else NAME_OF.get(bits.dtype.newbyteorder("<"))
    if given is None or given not in ITEM_BYTES or ITEM_BYTES[given] != bits.itemsize:
        raise ModelError(f"tensor {name} of numpy type {bits.dtype} cannot be saved as {given}")
    return given


def write_atomically(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Replace `path` by the joined parts in one step; nothing is left behind on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with temporary.open("xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


FORMAT = Format(detect, open_checkpoint)
