"""Hugging Face directories: config.json and one or many *.safetensors files, mapped and not read."""

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
from headstart.formats._header import PREFIX, header_size, parse_header
from headstart.formats._index import INDEX, SINGLE, join, missing_shard, pick, weight_map_of
from headstart.formats._json import read_object
from headstart.formats._mmap import map_file
from headstart.formats.base import ITEM_BYTES, NAME_OF, Bytes, Checkpoint, Format, Tensor, make_tensor
from headstart.text.chat import ChatTemplate
from headstart.text.tokenizer import Tokenizer

Array = NDArray[Any] | tuple[NDArray[Any], str]
"""A numpy array, or raw bits with a dtype name for what numpy lacks: (uint16 array, "BF16")."""


def detect(path: Path) -> bool:
    """A directory with config.json and at least one safetensors file (or their index)."""
    if not (path.is_dir() and (path / "config.json").exists()):
        return False
    return (path / INDEX).exists() or any(path.glob("*.safetensors"))


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
    index = path / INDEX
    if not index.exists():
        files = [path / SINGLE] if (path / SINGLE).exists() else sorted(path.glob("*.safetensors"))
        return join({file.name: read_file(file) for file in files}, str(path))
    weight_map = weight_map_of(read_object(index), str(index))
    shards: dict[str, dict[str, Tensor]] = {}
    for name in sorted(set(weight_map.values())):
        if not (path / name).exists():
            raise missing_shard(str(index), name)
        shards[name] = read_file(path / name)
    return pick(weight_map, shards, str(index))


def read_file(path: Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file, by name. ModelError for anything out of bounds."""
    return _parse(path, map_file(path))[0]


def read_metadata(path: Path) -> dict[str, str]:
    """The `__metadata__` strings of one safetensors file."""
    return _parse(path, map_file(path))[1]


def _parse(path: Path, raw: Bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    size = header_size(raw[:PREFIX].tobytes(), len(raw), str(path))
    entries, metadata = parse_header(raw[PREFIX : PREFIX + size].tobytes(), len(raw), str(path))
    tensors = {
        name: make_tensor(name, shape, dtype, raw[begin:end]) for name, (dtype, shape, begin, end, _) in entries.items()
    }
    return tensors, metadata


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
