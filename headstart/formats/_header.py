"""The header of a safetensors file: 8 bytes of length, then JSON. Every number is checked against the file's size.

Layout: https://github.com/huggingface/safetensors. Nothing of the data is read, so a piece of the file will do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from headstart.errors import ModelError
from headstart.formats._json import parse_object
from headstart.formats.base import ITEM_BYTES

MAX_HEADER = 100_000_000
PREFIX = 8
"""Bytes that hold the header's length."""
AGAIN = "the file is damaged or its download is incomplete: download it again"
_MAX_DIMS = 16

BITS: Mapping[str, int] = {
    **{dtype: 8 * size for dtype, size in ITEM_BYTES.items()},
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
}  # fmt: skip
"""Bits per element of every dtype that a header may name."""


class Place(NamedTuple):
    """One tensor of a header; `begin` and `end` count bytes from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def header_size(first: bytes, file_bytes: int, where: str) -> int:
    """The header's length from the file's first 8 bytes. ModelError for more than the file or the limit holds."""
    size = int.from_bytes(first[:PREFIX], "little")
    if len(first) < PREFIX or size > file_bytes - PREFIX:
        raise ModelError(f"{where} is {file_bytes} bytes long, too short for its header of {size} bytes", AGAIN)
    if size > MAX_HEADER:
        raise ModelError(f"{where} claims a header of {size} bytes; more than {MAX_HEADER} is not accepted", AGAIN)
    return size


def parse_header(text: bytes, data_bytes: int, where: str) -> tuple[dict[str, Place], dict[str, str]]:
    """Tensors by name, and the `__metadata__` strings. ModelError for anything out of bounds or overlapping."""
    header = parse_object(text, f"the header of {where}")
    metadata = header.pop("__metadata__", None) or {}
    places = {name: _place(where, name, entry, data_bytes) for name, entry in header.items()}
    _check_overlap(where, places)
    return places, {str(key): str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _place(where: str, name: str, entry: Any, data_bytes: int) -> Place:
    """One header entry, checked."""
    if not isinstance(entry, dict):
        raise ModelError(f"{where}: the header entry of tensor {name} is not an object", AGAIN)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ModelError(f"{where}: tensor {name} has dtype {dtype!r}", f"known are {', '.join(BITS)}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMS or not all(map(_is_size, shape)):
        raise ModelError(f"{where}: tensor {name} has the shape {shape!r}", AGAIN)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise ModelError(f"{where}: tensor {name} has the offsets {offsets!r}", AGAIN)
    begin, end = offsets
    if begin > end or end > data_bytes:
        raise ModelError(f"{where}: tensor {name} lies at bytes {begin}..{end} of {data_bytes}", AGAIN)
    wanted, rest = divmod(math.prod(shape) * BITS[dtype], 8)
    if wanted != end - begin or rest or (BITS[dtype] < 8 and shape and shape[-1] * BITS[dtype] % 8):
        raise ModelError(f"{where}: tensor {name} {dtype}{shape} needs {wanted} bytes, but has {end - begin}", AGAIN)
    return Place(dtype, tuple(shape), begin, end)


def _check_overlap(where: str, places: Mapping[str, Place]) -> None:
    last_name, last_end = "", 0
    for name, (_, _, begin, end) in sorted(places.items(), key=lambda item: item[1][2:]):
        if begin < last_end and begin < end:
            raise ModelError(f"{where}: tensors {last_name} and {name} overlap", AGAIN)
        if end > last_end:
            last_name, last_end = name, end
