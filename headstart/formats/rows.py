"""Tensors derived from others (row subsets, transposes, joined columns), computed at each access to save memory."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Tensor, make_tensor


class Deferred(ABC):
    """Base of RawTensors that are computed at each access. Subclasses define name, shape, dtype and `take_rows`."""

    shape: Any  # tuple[int, ...]

    @abstractmethod
    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        """A Tensor of rows [n], indices of the first dimension."""

    def read(self) -> Tensor:
        """The whole tensor, in memory."""
        return self.take_rows(np.arange(self.shape[0]))

    def part(self, index: int) -> Any:
        """One entry of the first dimension, as a Tensor without that dimension."""
        return self.take_rows(np.array([index])).part(0)

    def fingerprint(self) -> int:
        """A checksum like `Tensor.fingerprint`, without computing the tensor."""
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
    """The RawTensor itself if it is a Tensor, else the Tensor that it computes."""
    return tensor.read() if isinstance(tensor, Deferred) else tensor


class Source(Protocol):
    """The part of a RawTensor that other tensors are made of."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    def fingerprint(self) -> int: ...
    def take_rows(self, rows: NDArray[np.int64]) -> Any:
        """A Tensor of rows [n]."""

    def transposed(self) -> Any:
        """The transposed matrix, a Tensor in memory."""


@dataclass(frozen=True, eq=False)
class RowSubset(Deferred):
    """A RawTensor of rows [n] (indices of the first dimension) of `source`."""

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

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        taken: Tensor = self.source.take_rows(self.rows[rows])
        return taken

    def fingerprint(self) -> int:
        return zlib.crc32(np.ascontiguousarray(self.rows).data, self.source.fingerprint())


@dataclass(frozen=True, eq=False)
class Transposed(Deferred):
    """A RawTensor of the transpose of `source`."""

    source: Source

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
    """A RawTensor, F32: matrices with the same number of rows, concatenated along their columns."""

    name: str
    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape[0], sum(part.shape[1] for part in self.parts)

    @property
    def dtype(self) -> str:
        return "F32"

    def plain(self) -> Any:
        """The tensor itself, since its dtype is F32."""
        return self

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        values = np.hstack([part.take_rows(rows).float32() for part in self.parts])
        return make_tensor(self.name, values.shape, "F32", values.reshape(-1).view(np.uint8))


@dataclass(frozen=True, eq=False)
class JoinedRows(Deferred):
    """A RawTensor: matrices with the same number of columns, one below the other."""

    name: str
    parts: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def dtype(self) -> str:
        found = {part.dtype for part in self.parts}
        return found.pop() if len(found) == 1 and found <= {"BF16", "F16"} else "F32"

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        ends = np.cumsum([part.shape[0] for part in self.parts])
        place, dtype = np.searchsorted(ends, rows, side="right"), self.dtype
        data = np.empty((len(rows), self.shape[1] * (4 if dtype == "F32" else 2)), np.uint8)
        for index in np.unique(place):
            part, own = self.parts[index], place == index
            taken = part.take_rows(rows[own] - ends[index] + part.shape[0])
            data[own] = np.ascontiguousarray(taken.float32()).view(np.uint8) if dtype == "F32" else taken.data
        return make_tensor(self.name, (len(rows), self.shape[1]), dtype, data)


def row_parts(tensor: Source, sizes: Mapping[str, int]) -> dict[str, RowSubset]:
    """Matrices that are stored as one, by name. sizes: the number of rows of each, in their order."""
    bounds = pairwise(accumulate(sizes.values(), initial=0))
    return {name: RowSubset(tensor, np.arange(*each)) for name, each in zip(sizes, bounds, strict=True)}


def unpermute_rows(tensor: Source, num_heads: int, rotary: int | None = None) -> RowSubset:
    """q_proj or k_proj, weight or bias [num_heads * head_dim, ...], in Hugging Face's row order: all first elements of
    a head's rotary pairs, then all second ones. llama.cpp puts the two of a pair side by side. `rotary`: number of
    leading features of a head that are rotated; None: all. Raises ModelError if the rows do not make so many heads."""
    num_rows = tensor.shape[0]
    if num_heads <= 0 or num_rows % (2 * num_heads):
        raise ModelError(f"tensor {tensor.name} has {num_rows} rows, not {num_heads} heads of rotary pairs")
    order = np.arange(num_rows, dtype=np.int64).reshape(num_heads, -1)
    turned = order[:, :rotary].reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(num_heads, -1)
    return RowSubset(tensor, np.hstack((turned, order[:, turned.shape[1] :])).reshape(-1))
