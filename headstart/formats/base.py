"""What every checkpoint format yields: named tensors as the file has them, a config, a tokenizer.

Canonical tensor names are Hugging Face's Llama names without the `model.` prefix: `embed_tokens.weight`,
`layers.{i}.input_layernorm.weight`, `layers.{i}.self_attn.q_proj.weight`, `layers.{i}.mlp.gate_proj.weight`,
`norm.weight`, `lm_head.weight`, and so on. Shapes are in Hugging Face order: [out, in].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError

if TYPE_CHECKING:
    from headstart.text.chat import ChatTemplate
    from headstart.text.tokenizer import Tokenizer

Bytes = NDArray[np.uint8]

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Plain types: bytes per element. Every other dtype name is a ggml block type."""

_NUMPY: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1",
    "BOOL": "?",
}  # fmt: skip

NAME_OF: Mapping[np.dtype[Any], str] = {np.dtype(code): name for name, code in _NUMPY.items()}
"""numpy dtype (little-endian) -> plain type name."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of a checkpoint, mapped and not copied.

    `data` is uint8: [shape[0], bytes of one row] for two or more dimensions, else flat. `dtype` is a key of
    ITEM_BYTES or the name of a ggml block type (Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, ...), whose blocks run along a row.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: Bytes

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.data.size)

    def float32(self) -> NDArray[np.float32]:
        """The values, [*shape] (possibly a read-only view of the file). ModelError if the type holds no floats."""
        if self.dtype in ("F32", "F16", "F64"):
            values = self._view(_NUMPY[self.dtype])
        elif self.dtype == "BF16":
            values = (self._view("<u2").astype(np.uint32) << 16).view(np.float32)
        elif self.dtype == "F8_E4M3":
            values = _e4m3_table()[self.data]
        elif self.dtype == "F8_E5M2":  # the upper half of a float16
            values = (self.data.astype(np.uint16) << 8).view(np.float16)
        elif self.dtype == "F8_E8M0":
            values = np.where(self.data == 255, np.nan, np.ldexp(1.0, self.data.astype(np.int32) - 127))
        elif self.dtype in ITEM_BYTES:
            raise ModelError(f"tensor {self.name} holds {self.dtype}, but floating-point weights are wanted here")
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
        """Rows [n] of the first dimension, gathered as raw bytes, so exact for quantized rows too."""
        if not self.shape:
            raise ModelError(f"tensor {self.name} is a scalar and has no rows")
        if len(self.shape) == 1 and self.dtype not in ITEM_BYTES:
            raise ModelError(f"tensor {self.name} is one row of {self.dtype} blocks and cannot be split")
        grid = self.data.reshape(self.shape[0], self.nbytes // max(self.shape[0], 1))
        taken = grid[np.asarray(rows, dtype=np.int64)]
        flat = taken.reshape(-1) if len(self.shape) == 1 else taken
        return replace(self, shape=(len(rows), *self.shape[1:]), data=flat)

    def part(self, index: int) -> Tensor:
        """Item `index` of the first dimension, a view: one expert of a stack, one row as a vector."""
        if not 0 <= index < self.shape[0]:
            raise ModelError(f"tensor {self.name} {list(self.shape)} has no part {index}")
        return make_tensor(f"{self.name}[{index}]", self.shape[1:], self.dtype, self.data[index])

    def shaped(self, *shape: int) -> Tensor:
        """The same values in the same order under another shape, a view."""
        return make_tensor(self.name, shape, self.dtype, self.data)

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
        return make_tensor(
            self.name, self.shape, "F32", np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
        )

    def _view(self, dtype: str) -> NDArray[Any]:
        return self.data.reshape(-1).view(dtype)

    def _dequantize(self) -> NDArray[np.float32]:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            return np.asarray(dequantize(self.data, GGMLQuantizationType[self.dtype]), dtype=np.float32)
        except (KeyError, NotImplementedError) as error:
            hint = "convert the file to another quantization, such as Q8_0 or Q4_K_M"
            raise ModelError(f"tensor {self.name} is stored as {self.dtype}, which cannot be read", hint) from error


def _e4m3_table() -> NDArray[np.float32]:
    """float32 [256]: the values of F8_E4M3 (no infinities; 0x7f and 0xff are NaN)."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    size[(code & 127) == 127] = np.nan
    return np.where(code & 128, -size, size).astype(np.float32)


def make_tensor(name: str, shape: tuple[int, ...], dtype: str, raw: Bytes) -> Tensor:
    """A Tensor over `raw` (flat uint8 of exactly the right size), brought into the layout of `Tensor.data`."""
    rows = raw.reshape(shape[0], raw.size // max(shape[0], 1)) if len(shape) > 1 else raw.reshape(-1)
    return Tensor(name, shape, dtype, rows)


def _no_tokenizer() -> Tokenizer:
    raise ModelError("this checkpoint has no tokenizer")


def _no_template() -> ChatTemplate | None:
    return None


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened checkpoint: nothing is read but headers and configs until a tensor's values are asked for.

    `config` has the shape of Hugging Face's config.json (`model_type` is always set). `canonical_names` is False where
    `tensors` carries the names of the model's own Hugging Face implementation.
    """

    path: Path
    format: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    canonical_names: bool
    files: tuple[Path, ...] = ()  # that hold the tensors
    generation_config: dict[str, Any] = field(default_factory=dict)
    tokenizer: Callable[[], Tokenizer] = _no_tokenizer
    template: Callable[[], ChatTemplate | None] = _no_template

    def load_tokenizer(self) -> Tokenizer:
        """Build the tokenizer. Raises ModelError when the checkpoint has none or it cannot be read."""
        return self.tokenizer()

    def chat_template(self) -> ChatTemplate | None:
        """The checkpoint's chat template; None when it has none. Raises ModelError when it does not compile."""
        return self.template()


@dataclass(frozen=True)
class Format:
    """What a format file offers as `FORMAT`: whether a path is in the format (by its name and first bytes), and
    opening it (ModelError for anything wrong with the files)."""

    detect: Callable[[Path], bool]
    open_checkpoint: Callable[[Path], Checkpoint]
