"""Weights as drafts run with them: rounded to int4 as the native backend does, while gradients pass unrounded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

GROUP, LEVELS = 32, 15
REFINEMENTS = 2


def int4(weight: Tensor) -> Tensor:
    """A matrix [rows, columns] rounded to 4 bits, with a scale and a minimum for each group of 32 in a row, fitted by
    least squares (csrc/quantize.cpp does the same from more starts); the gradient is that of the identity (the
    straight-through estimator, Bengio et al. 2013). Rows that are no whole groups stay as they are."""
    if weight.shape[1] % GROUP:
        return weight
    rounded_weight: Tensor = _Pass.apply(weight)  # type: ignore[no-untyped-call]
    return rounded_weight


def rounded(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A module's weights as drafts run with them: matrices in int4, vectors as they are."""
    return {name: int4(weight) if weight.ndim == 2 and len(weight) > 1 else weight for name, weight in weights.items()}


class _Pass(torch.autograd.Function):
    """Rounds forward, leaves gradients alone."""

    @staticmethod
    def forward(ctx: object, weight: Tensor) -> Tensor:
        return _rounded(weight)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


def _rounded(weight: Tensor) -> Tensor:
    groups = weight.float().view(len(weight), -1, GROUP)
    low = groups.amin(-1, keepdim=True)
    scale = (groups.amax(-1, keepdim=True) - low) / LEVELS
    mean = groups.mean(-1, keepdim=True)
    for _ in range(REFINEMENTS):
        steps = _steps(groups, low, scale)
        centered = steps - steps.mean(-1, keepdim=True)
        spread = centered.square().sum(-1, keepdim=True)
        fitted = (centered * groups).sum(-1, keepdim=True) / spread.clamp(min=1e-12)
        scale = torch.where(spread > 0, fitted, scale)
        low = mean - scale * steps.mean(-1, keepdim=True)
    low, scale = low.half().float(), scale.half().float()
    return (low + scale * _steps(groups, low, scale)).view_as(weight).to(weight.dtype)


def _steps(groups: Tensor, low: Tensor, scale: Tensor) -> Tensor:
    return ((groups - low) / scale.clamp(min=1e-12)).round().clamp(0, LEVELS)
