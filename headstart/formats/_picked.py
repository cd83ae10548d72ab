"""Rows of a tensor in another order, or some of them, gathered when they are wanted: nothing is kept twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats._deferred import Deferred
from headstart.formats.base import Tensor


class Source(Protocol):
    """What rows can be taken of."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    def take_rows(self, rows: NDArray[np.int64]) -> Any:
        """A Tensor."""


@dataclass(frozen=True, eq=False)
class Picked(Deferred):
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
        found: Tensor = self.source.take_rows(self.rows)
        return found

    def take_rows(self, rows: NDArray[np.int64]) -> Tensor:
        found: Tensor = self.source.take_rows(self.rows[rows])
        return found

    def part(self, index: int) -> Tensor:
        return self.take_rows(np.array([index])).part(0)


def unpermute_rows(tensor: Source, num_heads: int) -> Picked:
    """Undo llama.cpp's row order of q_proj and k_proj: [num_heads * head_dim, ...] with the two halves of a rotary
    pair side by side -> Hugging Face's order, first halves then second halves of each head. Weights and biases."""
    num_rows = tensor.shape[0]
    if num_heads <= 0 or num_rows % (2 * num_heads):
        raise ModelError(f"tensor {tensor.name} has {num_rows} rows, not {num_heads} heads of rotary pairs")
    order = np.arange(num_rows, dtype=np.int64).reshape(num_heads, -1, 2)
    return Picked(tensor, order.swapaxes(1, 2).reshape(-1))
