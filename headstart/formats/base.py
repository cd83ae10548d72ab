"""What every checkpoint format yields: named tensors as the file has them, a config, a tokenizer.

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
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.grouped import layout_of, values as grouped_values
from headstart.placeholder import DOWNLOAD

if TYPE_CHECKING:
    from headstart.text.chat import ChatTemplate
    from headstart.text.tokenizer import Tokenizer

Bytes = NDArray[np.uint8]

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Plain types that can be read: bytes per element."""

BITS: Mapping[str, int] = {
    **{dtype: 8 * size for dtype, size in ITEM_BYTES.items()},
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
}  # fmt: skip
"""Bits per element of every dtype of safetensors. Every other dtype name is a ggml block type."""

_NUMPY: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
    "BOOL": "?",
}  # fmt: skip

NAME_OF: Mapping[np.dtype[Any], str] = {np.dtype(code): name for name, code in _NUMPY.items()}
"""numpy dtype (little-endian) -> plain type name."""

WIDENED = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0"})
"""Types of ggml whose blocks no kernel takes: such weights are float32 in memory, up to twenty times the file."""
_UNREAD = frozenset({"Q8_1", "Q8_K"})  # types of ggml that hold activations of a step, never weights
CONVERT = "convert the file to another quantization, such as Q8_0 or Q4_K_M"

WRAPPER = r"(?:(?:model|language_model|text_model|llm|thinker|backbone)\.)*"
"""Regular expression of what may stand before a language model's tensor names, in files of any family."""
_WRAPPER = re.compile(WRAPPER)

PIECE_BYTES = 1 << 22  # of what is read piece by piece
END_BYTES = 4096


@dataclass(frozen=True, eq=False)
class File:
    """A file that tensors lie in. `here`: it is on this machine; of others only headers were read. `mapped`: bytes are
    mapped, else read into memory each time, for files larger than it."""

    path: Path
    here: bool = True
    mapped: bool = True

    @cached_property
    def _all(self) -> Bytes:
        return map_file(self.path)

    def bytes_at(self, begin: int, nbytes: int) -> Bytes:
        """Bytes [begin, begin + nbytes), uint8: a view of the mapped file, or an array of its own."""
        if self.mapped:
            return self._all[begin : begin + nbytes]
        return np.frombuffer(self.read(begin, nbytes), np.uint8)

    def read(self, begin: int, nbytes: int) -> bytes:
        """Bytes [begin, begin + nbytes), or fewer at the end of the file. Nothing is mapped."""
        with self.path.open("rb") as file:
            file.seek(begin)
            return file.read(nbytes)


def map_file(path: Path) -> Bytes:
    """The file's bytes, uint8 [size], mapped and not read. ModelError for a missing, unreadable or empty file."""
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
    """One tensor of a checkpoint, by its place: nothing of it is read before it is asked for.

    `source` is a file or an array in memory (uint8 [size]); `begin` and `nbytes` count its bytes. `dtype` is a key of
    BITS, the name of a ggml block type (Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, ...), whose blocks run along a row, or a type of
    formats.grouped.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    source: File | Bytes
    begin: int
    nbytes: int

    @property
    def file(self) -> Path:
        """The file it lies in; an empty path in memory."""
        return self.source.path if isinstance(self.source, File) else Path()

    @property
    def here(self) -> bool:
        """Can its bytes be read?"""
        return not isinstance(self.source, File) or self.source.here

    @property
    def data(self) -> Bytes:
        """The bytes: uint8 [shape[0], bytes of one row] for two or more dimensions, else flat."""
        source, begin, size = self.source, self.begin, self.nbytes
        data = source.bytes_at(begin, size) if isinstance(source, File) else source[begin : begin + size]
        return data.reshape(self.shape[0], self.row_bytes) if len(self.shape) > 1 else data

    @property
    def row_bytes(self) -> int:
        """Bytes of an item of the first dimension."""
        return self.nbytes // max(self.shape[0], 1)

    def read_bytes(self, begin: int, nbytes: int) -> Bytes:
        """Bytes [begin, begin + nbytes) of the tensor, uint8, not mapped. ModelError when the file is shorter now."""
        if not isinstance(self.source, File):
            return self.source[self.begin + begin : self.begin + begin + nbytes]
        data = self.source.read(self.begin + begin, nbytes)
        if len(data) != nbytes:
            raise ModelError(f"{self.file} ends inside tensor {self.name}", "was the file changed meanwhile?")
        return np.frombuffer(data, np.uint8)

    def pieces(self) -> Iterator[Bytes]:
        """All bytes, a piece at a time, not mapped."""
        for begin in range(0, self.nbytes, PIECE_BYTES):
            yield self.read_bytes(begin, min(PIECE_BYTES, self.nbytes - begin))

    def fingerprint(self) -> int:
        """A checksum of the first and last 4 KiB: tensors of one name may hold other rows."""
        return ends_crc(self.data.reshape(-1))

    def float32(self) -> NDArray[np.float32]:
        """The values, [*shape] (possibly a read-only view of the file). ModelError if the type holds no floats."""
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
            raise ModelError(f"tensor {self.name} holds {self.dtype}, but floating-point weights are wanted here")
        elif layout := layout_of(self.dtype):
            rows = self.data.reshape(math.prod(self.shape[:-1]), -1)
            values = grouped_values(layout, rows, self.shape[-1], e4m3_table())
        else:
            values = self._dequantize()
        # An unaligned view (safetensors allows any offset) is copied: C++ readers rely on alignment.
        return np.require(values.reshape(self.shape), np.float32, ["C", "A"])

    def numpy(self) -> NDArray[Any]:
        """The values of an integer or boolean tensor (or plain float but BF16 and F8), [*shape], a view."""
        if self.dtype not in _NUMPY:
            raise ModelError(f"tensor {self.name} holds {self.dtype}, which numpy does not have", "use float32()")
        return self._view(_NUMPY[self.dtype]).reshape(self.shape)

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        """Rows [n] of the first dimension, as raw bytes, so exact for quantized rows too: gathered, or by their place
        where they follow each other."""
        if not self.shape:
            raise ModelError(f"tensor {self.name} is a scalar and has no rows")
        if len(self.shape) == 1 and self.dtype not in ITEM_BYTES:
            raise ModelError(f"tensor {self.name} is one row of {self.dtype} blocks and cannot be split")
        rows = np.asarray(rows, dtype=np.int64)
        if len(rows) and rows[0] >= 0 and rows[-1] < self.shape[0] and (np.diff(rows) == 1).all():
            return self.span(int(rows[0]), len(rows))
        taken = self.data.reshape(self.shape[0], self.row_bytes)[rows]
        return make_tensor(self.name, (len(rows), *self.shape[1:]), self.dtype, taken.reshape(-1))

    def span(self, begin: int, count: int) -> Tensor:
        """Rows [begin, begin + count) of the first dimension, by their place."""
        size = self.row_bytes
        shape = (count, *self.shape[1:])
        return replace(self, shape=shape, begin=self.begin + begin * size, nbytes=count * size)

    def part(self, index: int) -> Tensor:
        """Item `index` of the first dimension, a view: one expert of a stack, one row as a vector."""
        if not 0 <= index < self.shape[0]:
            raise ModelError(f"tensor {self.name} {list(self.shape)} has no part {index}")
        return replace(self.span(index, 1), name=f"{self.name}[{index}]", shape=self.shape[1:])

    def shaped(self, *shape: int) -> Tensor:
        """The same values in the same order under another shape."""
        return replace(self, shape=shape)

    def affine(self, factor: float, offset: float) -> Tensor:
        """factor * value + offset, in float32."""
        return self._changed(np.float32(factor) * self.float32() + np.float32(offset))

    def exp(self) -> Tensor:
        """e^value, in float32."""
        return self._changed(np.exp(self.float32()))

    def transposed(self) -> Tensor:
        """A matrix with rows and columns exchanged: bfloat16 and float16 stay, any other type becomes float32."""
        narrow = self.dtype in ("BF16", "F16")
        grid = (self._view("<u2") if narrow else self.float32()).reshape(self.shape)
        turned = np.ascontiguousarray(grid.T).reshape(-1).view(np.uint8)
        return make_tensor(f"{self.name}.T", self.shape[::-1], self.dtype if narrow else "F32", turned)

    def plain(self) -> Tensor:
        """Without quantization: a plain floating-point type stays, any other becomes float32."""
        if self.dtype in ("BF16", "F16", "F32"):
            return self
        return self._changed(self.float32())

    def _changed(self, values: NDArray[np.float32]) -> Tensor:
        """Other values under this name."""
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
    """A tensor's name without the wrappers before a language model."""
    match = _WRAPPER.match(name)
    return name[match.end() :] if match else name


def check_types(tensors: Iterable[Tensor]) -> None:
    """Raises ModelError for blocks of ggml that nobody reads, from their types alone."""
    unread = [each for each in tensors if each.dtype in _UNREAD]
    if unread:
        others = f" and {len(unread) - 1} more are" if len(unread) > 1 else " is"
        types = ", ".join(sorted({each.dtype for each in unread}))
        raise ModelError(f"tensor {unread[0].name}{others} stored as {types}, which cannot be read", CONVERT)


def widened(tensors: Iterable[Tensor]) -> tuple[list[str], int]:
    """The types of WIDENED that are among them, and the bytes of such weights as float32."""
    found = [each for each in tensors if each.dtype in WIDENED]
    return sorted({each.dtype for each in found}), 4 * sum(math.prod(each.shape) for each in found)


def in_int4(size: int) -> float:
    """Bytes that so many of float32 become with --quantization int4: 4 bits each, and a factor for 32 of them."""
    return size * 5 / 32


def e4m3_table() -> NDArray[np.float32]:
    """float32 [256]: the values of F8_E4M3 (no infinities; 0x7f and 0xff are NaN)."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    size[(code & 127) == 127] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


def make_tensor(name: str, shape: tuple[int, ...], dtype: str, raw: Bytes) -> Tensor:
    """A Tensor over `raw` (uint8 of exactly the right size) in memory."""
    return Tensor(name, shape, dtype, raw.reshape(-1), 0, raw.size)


def ends_crc(data: Bytes) -> int:
    """crc32 of the first and last 4 KiB of uint8 [size]."""
    return zlib.crc32(data[-END_BYTES:].tobytes(), zlib.crc32(data[:END_BYTES].tobytes()))  # a view may have gaps


def _no_tokenizer() -> Tokenizer:
    raise ModelError("this checkpoint has no tokenizer")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened checkpoint: nothing is read but headers and configs until a tensor's values are asked for.

    `config` has the shape of Hugging Face's config.json. `canonical_names` is False where `tensors` carries the names
    of the model's own Hugging Face implementation. `stray` are tensors of files that the index does not name;
    `tensors` has the MTP heads among them. `path` is the repo's name for files that are not on this machine.
    `load_tokenizer` raises ModelError when there is none or it cannot be read, `chat_template` (None: there is none)
    when it does not compile.
    """

    path: Path
    format: str  # safetensors or gguf
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    canonical_names: bool
    files: tuple[Path, ...] = ()  # that hold the tensors
    generation_config: dict[str, Any] = field(default_factory=dict)
    stray: dict[str, Tensor] = field(default_factory=dict)
    name: str = ""  # what the user called it; else its path
    load_tokenizer: Callable[[], Tokenizer] = _no_tokenizer
    chat_template: Callable[[], ChatTemplate | None] = lambda: None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name or str(self.path))

    @property
    def title(self) -> str:
        """The last part of the name: a cached repo's folder is called by its commit."""
        return Path(self.name).name or self.path.resolve().name


@dataclass(frozen=True)
class Format:
    """What a format file offers as `FORMAT`: whether a path is in the format (by its name and first bytes), and
    opening it (ModelError for anything wrong with the files)."""

    detect: Callable[[Path], bool]
    open_checkpoint: Callable[[Path], Checkpoint]
