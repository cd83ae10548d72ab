"""Trainable float32 weights ("masters") as layer builders read them: cast for a forward, or rounded to int4 as drafts
run, with gradients to the masters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.formats.rows import JoinedColumns, RowSubset
from headstart.heads.base import HeadSpec
from headstart.heads.kind import head_kind
from headstart.kernels.ops import Backend
from headstart.layers.weights import Weights

GROUP, LEVELS = 32, 15
REFINEMENTS = 2  # Least-squares fits of a group's scale and minimum


@dataclass(frozen=True, eq=False)
class TrainableTensor:
    """A RawTensor over torch values: a family's transformations of it are differentiable."""

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

    def take_rows(self, rows: NDArray[np.int64]) -> TrainableTensor:
        return self._changed(self.values[torch.from_numpy(np.ascontiguousarray(rows)).to(self.values.device)])

    def part(self, index: int) -> TrainableTensor:
        return self._changed(self.values[index])

    def shaped(self, *shape: int) -> TrainableTensor:
        return self._changed(self.values.reshape(shape))

    def transposed(self) -> TrainableTensor:
        return self._changed(self.values.T)

    def plain(self) -> TrainableTensor:
        return self

    def affine(self, factor: float, offset: float) -> TrainableTensor:
        return self._changed(factor * self.values + offset)

    def exp(self) -> TrainableTensor:
        return self._changed(self.values.exp())

    def _changed(self, values: Tensor) -> TrainableTensor:
        return TrainableTensor(self.name, values)


@dataclass(frozen=True)
class TorchWeights:
    """The part of a backend that `Weights` needs; its cast to `dtype` is differentiable."""

    dtype: torch.dtype

    def index(self, ids: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(ids)

    def weight(
        self, tensor: TrainableTensor | RowSubset | JoinedColumns, *, drafts: bool = False, precise: bool = False
    ) -> Tensor:
        if isinstance(tensor, JoinedColumns):
            return torch.cat([cast(TrainableTensor, part).values for part in tensor.parts], 1).to(self.dtype)
        whole: TrainableTensor = cast(Any, tensor).read() if isinstance(tensor, RowSubset) else tensor
        # a norm's ones, which the file lacks, are a plain tensor
        values = whole.values if isinstance(whole, TrainableTensor) else torch.from_numpy(whole.float32())
        return values.to(self.dtype)


def as_tensors(masters: Mapping[str, Tensor]) -> dict[str, TrainableTensor]:
    return {name: TrainableTensor(name, values) for name, values in masters.items()}


def cast_weights(tensors: Mapping[str, TrainableTensor], dtype: torch.dtype, source: str) -> Weights:
    """Weights for layer builders, cast to `dtype`; `source` names them in errors."""
    return Weights(tensors, cast(Backend, TorchWeights(dtype)), source)


def build_modules(masters: Mapping[str, Tensor], spec: HeadSpec, hidden: int, dtype: torch.dtype) -> Sequence[Any]:
    """The head's modules over masters cast to `dtype`; gradients reach the masters."""
    return head_kind(spec.kind).modules(cast_weights(as_tensors(masters), dtype, "the head"), spec, hidden)


def round_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A head's weights as drafts run on the native backend: matrices in int4, vectors unchanged."""
    return {
        name: round_int4(weight) if weight.ndim == 2 and len(weight) > 1 else weight for name, weight in weights.items()
    }


def round_int4(weight: Tensor) -> Tensor:
    """A matrix [rows, columns] rounded to 4 bits, with a scale and a minimum for each group of 32 in a row, fitted by
    least squares (csrc/quantize.cpp does the same from more starts). The gradient is that of the identity (the
    straight-through estimator, Bengio et al. 2013). Rows that are no whole groups are not rounded."""
    if weight.shape[1] % GROUP:
        return weight
    rounded: Tensor = _StraightThrough.apply(weight)  # type: ignore[no-untyped-call]
    return rounded


class _StraightThrough(torch.autograd.Function):
    """Rounds in the forward, passes gradients unchanged."""

    @staticmethod
    def forward(ctx: object, weight: Tensor) -> Tensor:
        return _round(weight)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


def _round(weight: Tensor) -> Tensor:
    groups = weight.float().view(len(weight), -1, GROUP)
    low = groups.amin(-1, keepdim=True)
    scale = (groups.amax(-1, keepdim=True) - low) / LEVELS
    mean = groups.mean(-1, keepdim=True)
    for _ in range(REFINEMENTS):
        codes = _codes(groups, low, scale)
        centered = codes - codes.mean(-1, keepdim=True)
        spread = centered.square().sum(-1, keepdim=True)
        fitted = (centered * groups).sum(-1, keepdim=True) / spread.clamp(min=1e-12)
        scale = torch.where(spread > 0, fitted, scale)
        low = mean - scale * codes.mean(-1, keepdim=True)
    low, scale = low.half().float(), scale.half().float()
    return (low + scale * _codes(groups, low, scale)).view_as(weight).to(weight.dtype)


def _codes(groups: Tensor, low: Tensor, scale: Tensor) -> Tensor:
    return ((groups - low) / scale.clamp(min=1e-12)).round().clamp(0, LEVELS)
