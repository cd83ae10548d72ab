"""Reads heads that are published as PyTorch pickles (EAGLE, Medusa), without torch.

A file is a zip archive. `*/data.pkl` maps each tensor to a part of a storage; `*/data/KEY` are the storages, not
compressed. The pickle may only name the entries of KNOWN, so reading it runs no code of the file; other names are
refused, as torch's `weights_only` does. Layout: torch 2.13, `serialization.py`, `_utils._rebuild_tensor_v2`.
"""

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.errors import ModelError
from headstart.formats.base import ITEM_BYTES, File, Tensor
from headstart.hub import HEAD_PICKLES

MAX_PICKLE_BYTES = 1 << 24  # of data.pkl, which holds names and sizes; a head's has a few thousand
LOCAL_HEADER = struct.Struct("<26xHH")  # zip's local file header, up to the lengths of its name and extra field
CONVERT = (
    'convert it: python -c "import torch, safetensors.torch as s; s.save_file({k: v.contiguous() for k, v in '
    "torch.load('FILE', weights_only=True).items()}, 'model.safetensors')\""
)
STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: str
    count: int


@dataclass(frozen=True)
class _View:
    """A contiguous tensor in a storage. `begin`: index of its first item."""

    storage: _Storage
    begin: int
    shape: tuple[int, ...]


class _Items(dict[Any, Any]):
    """Stands for OrderedDict; ignores the attributes that the pickle sets."""

    def __setstate__(self, state: object) -> None:
        pass


def _view(storage: object, begin: object, shape: object, strides: object, *rest: object) -> _View:
    if not (isinstance(storage, _Storage) and type(begin) is int and begin >= 0):
        raise ValueError("a tensor without a storage")
    sizes, steps = _sizes(shape), _sizes(strides)
    wanted, step = list[int](), 1
    for size in reversed(sizes):
        wanted.insert(0, step)
        step *= size
    if len(steps) != len(sizes) or any(
        size > 1 and have != want for size, have, want in zip(sizes, steps, wanted, strict=True)
    ):
        raise ValueError(f"a tensor of shape {sizes} whose values do not follow each other")
    if begin + math.prod(sizes) > storage.count:
        raise ValueError(f"a tensor of shape {sizes} that is larger than its storage")
    return _View(storage, begin, sizes)


def _sizes(values: object) -> tuple[int, ...]:
    if not isinstance(values, tuple) or len(values) > 8 or not all(type(each) is int and each >= 0 for each in values):
        raise ValueError(f"sizes {values!r}")
    return values


def _parameter(view: object, *rest: object) -> object:
    return view


KNOWN: Mapping[tuple[str, str], Callable[..., Any] | str] = {
    ("torch._utils", "_rebuild_tensor_v2"): _view,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("collections", "OrderedDict"): _Items,
    **{("torch", name): dtype for name, dtype in STORAGES.items()},
}
"""(module, name) that a pickle may use -> the function, class or dtype that replaces it here."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no tensor needs")
        return KNOWN[module, name]

    def persistent_load(self, place: object) -> _Storage:
        if not (isinstance(place, tuple) and len(place) == 5 and place[0] == "storage"):
            raise pickle.UnpicklingError(f"it names {place!r}")
        _, dtype, key, _, count = place
        if dtype not in ITEM_BYTES or not isinstance(key, str) or type(count) is not int or count < 0:
            raise pickle.UnpicklingError(f"it names a storage {place!r}")
        return _Storage(key, dtype, count)


def pickles_in(path: Path) -> list[Path]:
    """The files of a directory whose names are those of pickled heads."""
    return [path / name for name in HEAD_PICKLES if (path / name).is_file()]


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of one file, by name, without reading their values. Raises ModelError if the file is not a pickle of
    tensors, uses other names than KNOWN, or has sizes that do not fit."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {each.filename: each for each in archive.infolist()}
            (main,) = [name for name in members if name.rpartition("/")[2] == "data.pkl"]
            folder, _, _ = main.rpartition("data.pkl")
            if members[main].file_size > MAX_PICKLE_BYTES:
                raise ValueError(f"a pickle of {members[main].file_size} bytes")
            order = f"{folder}byteorder"
            if order in members and archive.read(order).strip() != b"little":
                raise ValueError("values are not little-endian")
            found = _Unpickler(io.BytesIO(archive.read(main))).load()  # runs no code of the file: see KNOWN
        if not isinstance(found, dict) or not all(isinstance(each, _View) for each in found.values()):
            raise ValueError("it holds something other than tensors by name")
        source, size = File(path, mapped=False), path.stat().st_size
        return {str(name): _tensor(str(name), view, members, folder, source, size) for name, view in found.items()}
    except (
        zipfile.BadZipFile, pickle.UnpicklingError, OSError, EOFError, ValueError, TypeError, AttributeError, KeyError,
        IndexError, RecursionError, OverflowError, NotImplementedError, RuntimeError, struct.error,
    ) as error:  # fmt: skip
        raise ModelError(f"{path} is not a file of tensors: {error}", CONVERT.replace("FILE", path.name)) from error


def _tensor(
    name: str, view: _View, members: Mapping[str, zipfile.ZipInfo], folder: str, source: File, size: int
) -> Tensor:
    member, item = members[f"{folder}data/{view.storage.key}"], ITEM_BYTES[view.storage.dtype]
    if member.compress_type != zipfile.ZIP_STORED or member.file_size < view.storage.count * item:
        raise ValueError(f"the storage of {name} is compressed or too short")
    begin = member.header_offset + 30 + sum(LOCAL_HEADER.unpack(source.read(member.header_offset, 30)))
    if begin + member.file_size > size:
        raise ValueError(f"the storage of {name} ends after the end of the file")
    return Tensor(name, view.shape, view.storage.dtype, source, begin + view.begin * item, math.prod(view.shape) * item)


def read_pickles(paths: Seq[Path]) -> dict[str, Tensor]:
    """The tensors of several files, by name."""
    return {name: tensor for path in paths for name, tensor in read_pickle(path).items()}
