"""Weights in training as layer builders want them: tensors of a file, but with gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.formats.rows import Picked, SideBySide
from headstart.kernels.ops import Backend
from headstart.layers.weights import Weights


@dataclass(frozen=True, eq=False)
class Master:
    """A RawTensor over torch values: what a family makes of its file's tensors is differentiable."""

    name: str
    values: Tensor

    dtype = "F32"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def fingerprint(self) -> int:
        return 0

    def float32(self) -> NDArray[np.float32]:
        """The values, without gradients."""
        array: NDArray[np.float32] = self.values.detach().float().cpu().numpy()
        return array

    def take_rows(self, rows: NDArray[np.int64]) -> Master:
        return self._changed(self.values[torch.from_numpy(np.ascontiguousarray(rows)).to(self.values.device)])

    def part(self, index: int) -> Master:
        return self._changed(self.values[index])

    def shaped(self, *shape: int) -> Master:
        return self._changed(self.values.reshape(shape))

    def transposed(self) -> Master:
        return self._changed(self.values.T)

    def plain(self) -> Master:
        return self

    def affine(self, factor: float, offset: float) -> Master:
        return self._changed(factor * self.values + offset)

    def exp(self) -> Master:
        return self._changed(self.values.exp())

    def _changed(self, values: Tensor) -> Master:
        return Master(self.name, values)


@dataclass(frozen=True)
class Cast:
    """The part of a backend that `Weights` needs; the cast is differentiable, so gradients reach the masters."""

    dtype: torch.dtype

    def index(self, ids: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(ids)

    def weight(self, tensor: Master | Picked | SideBySide, *, drafts: bool = False, precise: bool = False) -> Tensor:
        if isinstance(tensor, SideBySide):
            return torch.cat([cast(Master, part).values for part in tensor.parts], 1).to(self.dtype)
        whole: Master = cast(Any, tensor).read() if isinstance(tensor, Picked) else tensor
        values = whole.values if isinstance(whole, Master) else torch.from_numpy(whole.float32())  # a norm's ones
        return values.to(self.dtype)


def named(tensors: Mapping[str, Tensor]) -> dict[str, Master]:
    return {name: Master(name, values) for name, values in tensors.items()}


def weights_of(masters: Mapping[str, Master], dtype: torch.dtype, source: str) -> Weights:
    """Layer builders see the masters cast to `dtype`."""
    return Weights(masters, cast(Backend, Cast(dtype)), source)
