"""The header of a safetensors file: 8 bytes of length, then JSON. Every number is checked against the file's size.

Layout: https://github.com/huggingface/safetensors. Nothing of the data is read, so a piece of the file will do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

from headstart.errors import ModelError
from headstart.formats._json import parse_object
from headstart.formats.base import ITEM_BYTES

MAX_HEADER = 100_000_000
PREFIX = 8
"""Bytes that hold the header's length."""
AGAIN = "the file is damaged or its download is incomplete: download it again"
_MAX_DIMS = 16
_MOST = 2**63
_WORDS = (b'"dtype"', b'"shape"', b'"data_offsets"')

BITS: Mapping[str, int] = {
    **{dtype: 8 * size for dtype, size in ITEM_BYTES.items()},
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
}  # fmt: skip
"""Bits per element of every dtype that a header may name."""


class Entry(NamedTuple):
    """One tensor of a file: type name, shape, and the bytes of the file that hold it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    file: str

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


def header_size(first: bytes, file_bytes: int, where: str) -> int:
    """The header's length from the file's first 8 bytes. ModelError for more than the file or the limit holds."""
    size = int.from_bytes(first[:PREFIX], "little")
    if len(first) < PREFIX or size > file_bytes - PREFIX:
        raise ModelError(f"{where} is {file_bytes} bytes long, too short for its header of {size} bytes", AGAIN)
    if size > MAX_HEADER:
        raise ModelError(f"{where} claims a header of {size} bytes; more than {MAX_HEADER} is not accepted", AGAIN)
    return size


def parse_header(text: bytes, file_bytes: int, where: str, file: str = "") -> tuple[dict[str, Entry], dict[str, str]]:
    """Tensors by name, and the `__metadata__` strings. ModelError for anything out of bounds or overlapping."""
    header = _object(text, f"the header of {where}")
    metadata = header.pop("__metadata__", None) or {}
    base = PREFIX + len(text)
    entries = {name: _entry(where, name, row, base, file_bytes, file) for name, row in header.items()}
    _check_overlap(where, entries)
    return entries, {str(key): str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}


def _object(text: bytes, where: str) -> dict[str, Any]:
    """The header as an object in which no key appears twice."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    # Big headers: as many words as entries means that nothing is there twice. Else the slow parser has to say so.
    if isinstance(header, dict):
        count = len(header) - ("__metadata__" in header)
        if all(text.count(word) == count for word in _WORDS):
            return header
    return parse_object(text, where)


def _entry(where: str, name: str, row: Any, base: int, file_bytes: int, file: str) -> Entry:
    """One header entry, checked; its offsets count from byte `base` of the file."""
    if not isinstance(row, dict):
        raise ModelError(f"{where}: the header entry of tensor {name} is not an object", AGAIN)
    dtype, shape, offsets = row.get("dtype"), row.get("shape"), row.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ModelError(f"{where}: tensor {name} has dtype {dtype!r}", f"known are {', '.join(BITS)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        raise ModelError(f"{where}: tensor {name} has the shape {shape!r}", AGAIN)
    if type(offsets) is not list or len(offsets) != 2:
        raise ModelError(f"{where}: tensor {name} has the offsets {offsets!r}", AGAIN)
    begin, end = offsets
    if type(begin) is not int or type(end) is not int or begin < 0:
        raise ModelError(f"{where}: tensor {name} has the offsets {offsets!r}", AGAIN)
    if begin > end or end > file_bytes - base:
        raise ModelError(f"{where}: tensor {name} lies at bytes {begin}..{end} of {file_bytes - base}", AGAIN)
    bits = BITS[dtype]
    wanted, rest = divmod(math.prod(shape) * bits, 8)
    if wanted != end - begin or rest or (bits < 8 and shape and shape[-1] * bits % 8):
        raise ModelError(f"{where}: tensor {name} {dtype}{shape} needs {wanted} bytes, but has {end - begin}", AGAIN)
    return Entry(dtype, tuple(shape), base + begin, base + end, file)


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    if type(values) is not list:
        return False
    for value in values:  # noqa: SIM110  # a generator is slow for tens of thousands of short lists
        if type(value) is not int or not 0 <= value < _MOST:
            return False
    return True


def _check_overlap(where: str, entries: Mapping[str, Entry]) -> None:
    last_name, last_end = "", 0
    for begin, end, name in sorted([(begin, end, name) for name, (_, _, begin, end, _) in entries.items()]):
        if begin < last_end and begin < end:
            raise ModelError(f"{where}: tensors {last_name} and {name} overlap", AGAIN)
        if end > last_end:
            last_name, last_end = name, end
