"""Tensors that are made when they are wanted, so that nothing is kept twice; rows in another order, or some of them."""

import zlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Tensor, make_tensor


class Deferred(ABC):
    """A RawTensor, but for its name, shape, dtype and rows: everything else goes through the whole."""

    @abstractmethod
    def read(self) -> Tensor:
        """The plain tensor, in memory."""

    def fingerprint(self) -> int:
        """As Tensor's, without making the tensor."""
        return 0

    def float32(self) -> NDArray[np.float32]:
        return self.read().float32()

    def shaped(self, *shape: int) -> Tensor:
        return self.read().shaped(*shape)

    def affine(self, factor: float, offset: float) -> Tensor:
        return self.read().affine(factor, offset)

    def exp(self) -> Tensor:
        return self.read().exp()

    def transposed(self) -> Tensor:
        return self.read().transposed()

    def plain(self) -> Tensor:
        return self.read().plain()


def in_memory(tensor: Any) -> Tensor:
    """The plain tensor that a RawTensor of this folder is, or stands for."""
    return tensor.read() if isinstance(tensor, Deferred) else tensor


class Source(Protocol):
    """What rows can be taken of."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    def fingerprint(self) -> int: ...
    def take_rows(self, rows: NDArray[np.int64]) -> Any:
        """A Tensor."""


class Transposable(Source, Protocol):
    """A matrix that can be transposed."""

    def transposed(self) -> Any:
        """A Tensor."""


@dataclass(frozen=True, eq=False)
class RowSubset(Deferred):
    """A RawTensor: rows [n] of the first dimension of `source`."""

    source: Source
    rows: NDArray[np.int64]

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.source.shape[1:])

    @property
    def dtype(self) -> str:
        return self.source.dtype

    def read(self) -> Tensor:
        """The plain tensor, in memory."""
        return self.take_rows(np.arange(len(self.rows)))

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        taken: Tensor = self.source.take_rows(self.rows[rows])
        return taken

    def fingerprint(self) -> int:
        return zlib.crc32(np.ascontiguousarray(self.rows).data, self.source.fingerprint())

    def part(self, index: int) -> Tensor:
        return self.take_rows(np.array([index])).part(0)


@dataclass(frozen=True, eq=False)
class Transposed(Deferred):
    """A RawTensor: the matrix `source` with rows and columns exchanged."""

    source: Transposable

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.source.shape[::-1]

    @property
    def dtype(self) -> str:
        return self.source.dtype if self.source.dtype in ("BF16", "F16") else "F32"

    def fingerprint(self) -> int:
        return self.source.fingerprint() + 1

    def read(self) -> Tensor:
        turned: Tensor = self.source.transposed()
        return turned

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        return self.read().take_rows(rows)


@dataclass(frozen=True, eq=False)
class JoinedColumns(Deferred):
    """Matrices of as many rows each, as one with the columns of all, in float32."""

    name: str
    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape[0], sum(part.shape[1] for part in self.parts)

    @property
    def dtype(self) -> str:
        return "F32"

    def read(self) -> Tensor:
        return self.take_rows(np.arange(self.shape[0]))

    def plain(self) -> Any:
        """Itself: it is floats."""
        return self

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        values = np.hstack([part.take_rows(rows).float32() for part in self.parts])
        return make_tensor(self.name, values.shape, "F32", values.reshape(-1).view(np.uint8))

    def part(self, index: int) -> Tensor:
        return self.read().part(index)


def unpermute_rows(tensor: Source, num_heads: int, rotary: int | None = None) -> RowSubset:
    """Undo llama.cpp's row order of q_proj and k_proj: [num_heads * head_dim, ...] with the two halves of a rotary
    pair side by side -> Hugging Face's order, first halves then second halves of each head; of the first `rotary`
    features of a head (None: all). Weights and biases."""
    num_rows = tensor.shape[0]
    if num_heads <= 0 or num_rows % (2 * num_heads):
        raise ModelError(f"tensor {tensor.name} has {num_rows} rows, not {num_heads} heads of rotary pairs")
    order = np.arange(num_rows, dtype=np.int64).reshape(num_heads, -1)
    turned = order[:, :rotary].reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(num_heads, -1)
    return RowSubset(tensor, np.hstack((turned, order[:, turned.shape[1] :])).reshape(-1))
