"""Headers of safetensors files, and `model.safetensors.index.json`, which maps tensor names to files.

A header is 8 bytes of length, then JSON. Every number is checked against the file's size. No tensor data is read, so
the first bytes of a file suffice. Layout: https://github.com/huggingface/safetensors.
"""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, TypeGuard

from headstart.errors import ModelError
from headstart.formats.base import BITS, File, Tensor
from headstart.formats.json_object import parse_object
from headstart.placeholder import FIRST_BYTES, placeholder_error

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

MAX_HEADER = 100_000_000
PREFIX = 8  # bytes that hold the header's length
AGAIN = "the file is damaged or its download is incomplete: download it again"
_MAX_DIMS = 16
_MAX_SIZE = 2**63
_WORDS = (b'"dtype"', b'"shape"', b'"data_offsets"')


def read_file(path: Path, *, mapped: bool = True) -> dict[str, Tensor]:
    """The tensors of one file, by name. Raises ModelError for an unreadable file and an invalid header."""
    try:
        if not path.is_file():  # a pipe would wait for its writer
            path.stat()
            raise ModelError(f"cannot read {path}: it is not a file", "is it there, and may you read it?")
        with path.open("rb") as file:
            size = path.stat().st_size
            first = file.read(FIRST_BYTES)
            if placeholder := placeholder_error(path, first, size):
                raise placeholder
            end = PREFIX + header_size(first, size, str(path))
            header = first[PREFIX:end] + file.read(max(0, end - len(first)))
            return parse_header(header, size, str(path), File(path, mapped=mapped))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", "is it a file, and may you read it?") from error


def header_size(first: bytes, file_bytes: int, where: str) -> int:
    """The header's length from the file's first 8 bytes. Raises ModelError if it exceeds the file or MAX_HEADER."""
    size = int.from_bytes(first[:PREFIX], "little")
    if len(first) < PREFIX or size > file_bytes - PREFIX:
        raise ModelError(f"{where} is {file_bytes} bytes long, too short for its header of {size} bytes", AGAIN)
    if size > MAX_HEADER:
        raise ModelError(f"{where} claims a header of {size} bytes; more than {MAX_HEADER} is not accepted", AGAIN)
    return size


def parse_header(text: bytes, file_bytes: int, where: str, file: File) -> dict[str, Tensor]:
    """The tensors of a header's JSON, by name. `file_bytes`: size of the file. Raises ModelError for invalid entries,
    and for tensors that overlap, leave gaps or end outside the file."""
    header = _object(text, f"the header of {where}")
    header.pop("__metadata__", None)
    base = PREFIX + len(text)
    tensors = {name: _tensor(where, name, row, base, file) for name, row in header.items()}
    _check_places(where, tensors.values(), base, file_bytes)
    return tensors


def _object(text: bytes, where: str) -> dict[str, Any]:
    """The header's JSON object. Raises ModelError for other JSON or a duplicate key."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    # json.loads is fast but hides duplicate keys: without any, each word occurs once per entry; else parse slowly
    if isinstance(header, dict):
        count = len(header) - ("__metadata__" in header)
        if all(text.count(word) == count for word in _WORDS):
            return header
    return parse_object(text, where)


def _tensor(where: str, name: str, row: Any, base: int, file: File) -> Tensor:
    """The tensor of one header entry. Its offsets count from byte `base` of the file. Raises ModelError."""
    if not isinstance(row, dict):
        raise ModelError(f"{where}: the header entry of tensor {name} is not an object", AGAIN)
    dtype, shape, offsets = row.get("dtype"), row.get("shape"), row.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ModelError(f"{where}: tensor {name} has dtype {dtype!r}", f"known are {', '.join(BITS)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        raise ModelError(f"{where}: tensor {name} has the shape {shape!r}", AGAIN)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{where}: tensor {name} has the offsets {offsets!r}", AGAIN)
    begin, end = offsets
    bits = BITS[dtype]
    wanted, rest = divmod(math.prod(shape) * bits, 8)
    if wanted != end - begin or rest or (bits < 8 and shape and shape[-1] * bits % 8):
        raise ModelError(f"{where}: tensor {name} {dtype}{shape} needs {wanted} bytes, but has {end - begin}", AGAIN)
    return Tensor(name, tuple(shape), dtype, file, base + begin, end - begin)


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    if type(values) is not list:
        return False
    for value in values:  # noqa: SIM110  # a generator is slow for tens of thousands of short lists
        if type(value) is not int or not 0 <= value < _MAX_SIZE:
            return False
    return True


def _check_places(where: str, tensors: Iterable[Tensor], base: int, file_bytes: int) -> None:
    """Raise ModelError unless the tensors fill the file from byte `base` on, without gaps or overlaps."""
    last_name, end = "", base
    for begin, size, name in sorted([(tensor.begin, tensor.nbytes, tensor.name) for tensor in tensors]):
        if begin < end and size:
            raise ModelError(f"{where}: tensors {last_name} and {name} overlap", AGAIN)
        if begin > end:
            raise ModelError(f"{where}: bytes {end - base}..{begin - base} belong to no tensor", AGAIN)
        if begin + size > end:
            last_name, end = name, begin + size
    if end > file_bytes:
        raise ModelError(f"{where}: the file has {file_bytes} bytes, but its tensors need {end}", AGAIN)
    if end != file_bytes:
        raise ModelError(f"{where} has {file_bytes - end} bytes after its last tensor", AGAIN)


def weight_map_of(index: Mapping[str, object], where: str) -> dict[str, str]:
    """Tensor name -> file name of its shard, from an index. Raises ModelError for an invalid map or a path in it."""
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ModelError(f"{where} has no weight_map from tensor names to file names", AGAIN)
    for file in set(files.values()):
        if PurePath(file).name != file:
            raise ModelError(f"{where} names the shard {file!r}, which is not a plain file name", AGAIN)
    return files


def pick(weight_map: Mapping[str, str], shards: Mapping[str, Mapping[str, Tensor]], where: str) -> dict[str, Tensor]:
    """The tensors that the index names, by name. Raises ModelError if a shard lacks one of its tensors."""
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise ModelError(f"{where} says tensor {name} is in {file}, but it is not", AGAIN)
    return {name: shards[file][name] for name, file in weight_map.items()}


def join(shards: Mapping[str, Mapping[str, Tensor]], where: str) -> dict[str, Tensor]:
    """The tensors of files without an index, by name. Raises ModelError for a name in two files."""
    joined: dict[str, Tensor] = {}
    for file, tensors in shards.items():
        if twice := joined.keys() & tensors.keys():
            raise ModelError(f"tensor {min(twice)} is in {file} and in another file of {where}", "keep one of them")
        joined.update(tensors)
    return joined


def is_stale(here: Iterable[str], index: Mapping[str, object], index_name: str) -> bool:
    """Whether there is a SINGLE file that the index does not name. As in transformers, it is then used instead."""
    return SINGLE in here and SINGLE not in weight_map_of(index, index_name).values()


def shards_of(
    here: Iterable[str], index: Mapping[str, object] | None, index_name: str, partial: Iterable[str] = ()
) -> list[str]:
    """The names of the checkpoint's files among the existing files `here`. `partial`: names of incomplete downloads.
    Raises ModelError for a missing file."""
    here = list(here)
    if index is None:
        return [SINGLE] if SINGLE in here else here
    wanted = sorted(set(weight_map_of(index, index_name).values()))
    for file in wanted:
        if file not in here:
            begun = next((name for name in partial if name.startswith(file)), None)
            note = f": {begun} is an incomplete download" if begun else ""
            raise ModelError(f"{index_name} names the shard {file}, which is missing{note}", "download the model again")
    return wanted


def tensors_of(
    shards: Mapping[str, Mapping[str, Tensor]], index: Mapping[str, object] | None, index_name: str, where: str
) -> dict[str, Tensor]:
    """The tensors of a checkpoint's shards, by name. With an index, only those that it names."""
    return pick(weight_map_of(index, index_name), shards, index_name) if index else join(shards, where)
