"""The result of every checkpoint format: tensors by name in the file's encoding, a config, a tokenizer.

Canonical tensor names are Hugging Face's Llama names without the `model.` prefix: `embed_tokens.weight`,
`layers.{i}.input_layernorm.weight`, `layers.{i}.self_attn.q_proj.weight`, `layers.{i}.mlp.gate_proj.weight`,
`norm.weight`, `lm_head.weight`, and so on. Shapes are in Hugging Face order: [out, in].
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from headstart import exact
from headstart.core import Bytes
from headstart.errors import ModelError
from headstart.formats.grouped import layout_of, values as grouped_values
from headstart.placeholder import DOWNLOAD

if TYPE_CHECKING:
    from headstart.text.chat import ChatTemplate
    from headstart.text.tokenizer import Tokenizer


ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Plain dtype that can be read -> bytes per element."""

BITS: Mapping[str, int] = {
    **{dtype: 8 * size for dtype, size in ITEM_BYTES.items()},
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
}  # fmt: skip
"""dtype of safetensors -> bits per element. Every other dtype name is a ggml block type or one of formats.grouped."""

_NUMPY: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
    "BOOL": "?",
}  # fmt: skip

NAME_OF: Mapping[np.dtype[Any], str] = {np.dtype(code): name for name, code in _NUMPY.items()}
"""numpy dtype (little-endian) -> plain type name."""

WIDENED = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"})
"""ggml types that no kernel supports: such weights become float32 in memory, up to twenty times the file's size."""
_UNREAD = frozenset({"Q8_1", "Q8_K"})  # ggml types of activations, never of weights
CONVERT = "convert the file to another quantization, such as Q8_0 or Q4_K_M"

WRAPPER = r"(?:(?:model|language_model|text_model|llm|thinker|backbone)\.)*"
"""Regular expression of the prefixes that a language model's tensor names may have, in files of any family."""
_WRAPPER = re.compile(WRAPPER)

PIECE_BYTES = 1 << 22  # size of a piece in Tensor.pieces
END_BYTES = 4096  # bytes at each end of a tensor that its fingerprint covers


@dataclass(frozen=True, eq=False)
class File:
    """A file that holds tensors. `here`: it is on this machine (of remote files only headers were read). `mapped`:
    its bytes are memory-mapped; False: they are read at each access, so that a file may exceed the memory."""

    path: Path
    here: bool = True
    mapped: bool = True

    @cached_property
    def _all(self) -> Bytes:
        return map_file(self.path)

    def bytes_at(self, begin: int, nbytes: int) -> Bytes:
        """uint8 [nbytes] from byte `begin` on: a view of the mapped file, or a new array."""
        return self._all[begin : begin + nbytes] if self.mapped else np.frombuffer(self.read(begin, nbytes), np.uint8)

    def read(self, begin: int, nbytes: int) -> bytes:
        """Bytes [begin, begin + nbytes). Nothing is mapped. ModelError if the file became shorter or unreadable."""
        try:
            with self.path.open("rb") as file:
                file.seek(begin)
                data = file.read(nbytes)
        except OSError as error:
            raise ModelError(f"cannot read {self.path}: {error.strerror}", "is the disk there and intact?") from error
        if len(data) != nbytes:
            what = f"{self.path} ends after {begin + len(data)} bytes, but {begin + nbytes} are needed"
            raise ModelError(what, "was the file changed after it was opened?")
        return data


def map_file(path: Path) -> Bytes:
    """The file's bytes, uint8 [size], memory-mapped. Raises ModelError for a missing, unreadable or empty file."""
    try:
        if not path.is_file():
            raise ModelError(f"{path} is not a file")
        if path.stat().st_size == 0:
            raise ModelError(f"{path} is empty", DOWNLOAD)
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error


@dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """One tensor of a checkpoint. Stores where its bytes are; they are read when a method needs them.

    `source` is a file or an array in memory (uint8 [size]), and the tensor is its bytes [begin, begin + nbytes).
    `dtype` is a key of BITS, a ggml block type (Q4_0, Q8_0, Q6_K, ..., with blocks along a row), or a type of
    formats.grouped. `shape` counts elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: File | Bytes
    begin: int
    nbytes: int

    @property
    def file(self) -> Path:
        """The tensor's file; an empty path for a tensor in memory."""
        return self.source.path if isinstance(self.source, File) else Path()

    @property
    def here(self) -> bool:
        """Whether the bytes can be read: False for tensors of remote files."""
        return not isinstance(self.source, File) or self.source.here

    @property
    def data(self) -> Bytes:
        """The bytes: uint8 [shape[0], bytes of one row] for two or more dimensions, else flat."""
        source, begin, size = self.source, self.begin, self.nbytes
        data = source.bytes_at(begin, size) if isinstance(source, File) else source[begin : begin + size]
        return data.reshape(self.shape[0], self.row_bytes) if len(self.shape) > 1 else data

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return self.nbytes // max(self.shape[0], 1)

    def read_bytes(self, begin: int, nbytes: int) -> Bytes:
        """uint8 [nbytes] from the tensor's byte `begin` on, without mapping. ModelError if the file became shorter."""
        if not isinstance(self.source, File):
            return self.source[self.begin + begin : self.begin + begin + nbytes]
        return np.frombuffer(self.source.read(self.begin + begin, nbytes), np.uint8)

    def pieces(self) -> Iterator[Bytes]:
        """Yield all bytes in pieces of PIECE_BYTES, read without mapping."""
        for begin in range(0, self.nbytes, PIECE_BYTES):
            yield self.read_bytes(begin, min(PIECE_BYTES, self.nbytes - begin))

    def fingerprint(self) -> int:
        """crc32 of the first and last 4 KiB, to tell apart tensors of one name with different content."""
        return ends_crc(self.data.reshape(-1))

    def float32(self) -> NDArray[np.float32]:
        """The values, [*shape], possibly a read-only view of the file. ModelError for integer and unreadable dtypes."""
        if self.dtype in ("F32", "F16", "F64"):
            values = self._view(_NUMPY[self.dtype])
        elif self.dtype == "BF16":
            values = (self._view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif self.dtype == "F8_E4M3":
            values = e4m3_table()[self.data]
        elif self.dtype == "F8_E5M2":  # the upper half of a float16
            values = (self.data.astype(np.uint16) << 8).view(np.float16)
        elif self.dtype == "F8_E8M0":
            values = np.where(self.data == 255, np.nan, np.ldexp(1.0, self.data.astype(np.int32) - 127))
        elif self.dtype in ITEM_BYTES:
            raise ModelError(f"tensor {self.name} holds {self.dtype}, but floating-point weights are needed here")
        elif layout := layout_of(self.dtype):
            rows = self.data.reshape(math.prod(self.shape[:-1]), -1)
            values = grouped_values(layout, rows, self.shape[-1], e4m3_table())
        else:
            values = self._dequantize()
        # An unaligned view (safetensors allows any offset) is copied: C++ readers rely on alignment.
        return np.require(values.reshape(self.shape), np.float32, ["C", "A"])

    def numpy(self) -> NDArray[Any]:
        """The values in the file's dtype, [*shape], a view. ModelError if numpy lacks the dtype (BF16, F8)."""
        if self.dtype not in _NUMPY:
            raise ModelError(f"tensor {self.name} holds {self.dtype}, which numpy does not have", "use float32()")
        return self._view(_NUMPY[self.dtype]).reshape(self.shape)

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        """A tensor of rows [n] (indices of the first dimension), with their raw bytes: a view of the file if they are
        consecutive, else a copy in memory. Raises ModelError for a tensor that has no rows."""
        if not self.shape:
            raise ModelError(f"tensor {self.name} is a scalar and has no rows")
        if len(self.shape) == 1 and self.dtype not in ITEM_BYTES:
            raise ModelError(f"tensor {self.name} is one row of {self.dtype} blocks and cannot be split")
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and rows[0] >= 0 and rows[-1] < self.shape[0] and (np.diff(rows) == 1).all():
            return self.span(int(rows[0]), len(rows))
        if isinstance(self.source, File) and not self.source.mapped and 4 * len(rows) < self.shape[0]:
            taken = np.concatenate([self.span(int(row), 1).data.reshape(-1) for row in rows])
        else:
            taken = self.data.reshape(self.shape[0], self.row_bytes)[rows]
        return make_tensor(self.name, (len(rows), *self.shape[1:]), self.dtype, taken.reshape(-1))

    def unmapped(self) -> Tensor:
        """The tensor with its bytes read at each access instead of mapped."""
        return replace(self, source=replace(self.source, mapped=False)) if isinstance(self.source, File) else self

    def span(self, begin: int, count: int) -> Tensor:
        """Rows [begin, begin + count) of the first dimension, without a copy."""
        size = self.row_bytes
        shape = (count, *self.shape[1:])
        return replace(self, shape=shape, begin=self.begin + begin * size, nbytes=count * size)

    def part(self, index: int) -> Tensor:
        """Index `index` of the first dimension, without a copy: one expert of a stack, or one row as a vector."""
        if not 0 <= index < self.shape[0]:
            raise ModelError(f"tensor {self.name} {list(self.shape)} has no part {index}")
        return replace(self.span(index, 1), name=f"{self.name}[{index}]", shape=self.shape[1:])

    def shaped(self, *shape: int) -> Tensor:
        """The same values in the same order with another shape."""
        return replace(self, shape=shape)

    def as_matrix(self) -> Tensor:
        """The same values as one matrix: leading dimensions are flattened into rows."""
        return self.shaped(math.prod(self.shape[:-1]), self.shape[-1])

    def affine(self, factor: float, offset: float) -> Tensor:
        """A tensor of factor * value + offset, in float32."""
        return self._changed(np.float32(factor) * self.float32() + np.float32(offset))

    def exp(self) -> Tensor:
        """A tensor of e^value, in float32."""
        return self._changed(exact.exp(self.float32()))

    def transposed(self) -> Tensor:
        """The transposed matrix, in memory. BF16 and F16 keep their dtype, any other becomes F32."""
        narrow = self.dtype in ("BF16", "F16")
        grid = (self._view("<u2") if narrow else self.float32()).reshape(self.shape)
        columns = np.ascontiguousarray(grid.T).reshape(-1).view(np.uint8)
        return make_tensor(f"{self.name}.T", self.shape[::-1], self.dtype if narrow else "F32", columns)

    def plain(self) -> Tensor:
        """The tensor itself if its dtype is BF16, F16 or F32, else its values as F32 in memory."""
        if self.dtype in ("BF16", "F16", "F32"):
            return self
        return self._changed(self.float32())

    def _changed(self, values: NDArray[np.float32]) -> Tensor:
        """An F32 tensor in memory with other values, and this name and shape."""
        return make_tensor(self.name, self.shape, "F32", np.ascontiguousarray(values, np.float32).view(np.uint8))

    def _view(self, dtype: str) -> NDArray[Any]:
        return self.data.reshape(-1).view(dtype)

    def _dequantize(self) -> NDArray[np.float32]:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            return np.asarray(dequantize(self.data, GGMLQuantizationType[self.dtype]), dtype=np.float32)
        except (KeyError, NotImplementedError) as error:
            raise ModelError(f"tensor {self.name} is stored as {self.dtype}, which cannot be read", CONVERT) from error


def strip_wrapper(name: str) -> str:
    """A tensor's name without the prefixes of WRAPPER."""
    match = _WRAPPER.match(name)
    return name[match.end() :] if match else name


def check_types(tensors: Iterable[Tensor]) -> None:
    """Raise ModelError if a tensor has a dtype that cannot be read. Reads no values."""
    unread = [each for each in tensors if each.dtype in _UNREAD]
    if unread:
        others = f" and {len(unread) - 1} more are" if len(unread) > 1 else " is"
        types = ", ".join(sorted({each.dtype for each in unread}))
        raise ModelError(f"tensor {unread[0].name}{others} stored as {types}, which cannot be read", CONVERT)


def widened(tensors: Iterable[Tensor]) -> tuple[list[str], int]:
    """The sorted dtypes of `tensors` that are in WIDENED, and the bytes of these tensors as float32."""
    found = [each for each in tensors if each.dtype in WIDENED]
    return sorted({each.dtype for each in found}), 4 * sum(math.prod(each.shape) for each in found)


def in_int4(size: int) -> float:
    """Bytes that `size` bytes of float32 take with --quantization int4: 20 bytes for 32 values."""
    return size * 5 / 32


def e4m3_table() -> NDArray[np.float32]:
    """float32 [256]: the value of each F8_E4M3 code (no infinities; 0x7f and 0xff are NaN)."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    size[(code & 127) == 127] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


def make_tensor(name: str, shape: tuple[int, ...], dtype: str, raw: Bytes) -> Tensor:
    """A Tensor in memory over `raw`, uint8 with exactly the bytes of this shape and dtype."""
    return Tensor(name, shape, dtype, raw.reshape(-1), 0, raw.size)


def ends_crc(data: Bytes) -> int:
    """crc32 of the first and last 4 KiB of uint8 [size]."""
    return zlib.crc32(data[-END_BYTES:].tobytes(), zlib.crc32(data[:END_BYTES].tobytes()))  # a view may have gaps


def _no_tokenizer() -> Tokenizer:
    raise ModelError("this checkpoint has no tokenizer")


def text_readers(method: Literal["from_directory", "from_gguf"], *source: Any) -> dict[str, Any]:
    """`load_tokenizer` and `chat_template` of a Checkpoint: `method` of both classes, whose modules are slow to import,
    with the arguments `source`."""

    def load_tokenizer() -> Any:
        from headstart.text.tokenizer import Tokenizer

        return getattr(Tokenizer, method)(*source)

    def chat_template() -> Any:
        from headstart.text.chat import ChatTemplate

        return getattr(ChatTemplate, method)(*source)

    return {"load_tokenizer": load_tokenizer, "chat_template": chat_template}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened checkpoint. Only headers and configs are read until a tensor's values are needed.

    `config` has the structure of Hugging Face's config.json. `canonical_names`: tensor names are canonical (see the
    module); False: they are those of the model's Hugging Face implementation. `stray`: tensors of files that the index
    does not name; the MTP heads among them are also in `tensors`. `path`: the repo's name for a remote checkpoint.
    `load_tokenizer` raises ModelError if there is no readable tokenizer. `chat_template` returns None without a
    template and raises ModelError if it does not compile.
    """

    path: Path
    format: str  # safetensors or gguf
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    canonical_names: bool
    files: tuple[Path, ...] = ()  # files that hold `tensors`
    generation_config: dict[str, Any] = field(default_factory=dict)
    stray: dict[str, Tensor] = field(default_factory=dict)
    projector: Path | None = None  # llama.cpp's file of the model's vision tower
    name: str = ""  # the name that the user gave; default: the path
    load_tokenizer: Callable[[], Tokenizer] = _no_tokenizer
    chat_template: Callable[[], ChatTemplate | None] = lambda: None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or str(self.path))

    @property
    def here(self) -> bool:
        """Whether the bytes of all tensors can be read: False where only headers of remote files were read."""
        return all(tensor.here for tensor in self.tensors.values())

    @property
    def loaded_bytes(self) -> int:
        """Bytes of the weights in memory: types without a kernel as float32, others as stored."""
        _, wide = widened(self.tensors.values())
        return wide + sum(each.nbytes for each in self.tensors.values() if each.dtype not in WIDENED)

    @property
    def title(self) -> str:
        """The last part of the name: a cached repo's folder is called by its commit."""
        return Path(self.name).name or self.path.resolve().name


@dataclass(frozen=True)
class Format:
    """The `FORMAT` of a format's file. `detect`: whether a path has the format, by its name and first bytes.
    `open_checkpoint` raises ModelError for damaged or missing files."""

    detect: Callable[[Path], bool]
    open_checkpoint: Callable[[Path], Checkpoint]
