"""Residual streams side by side, and entries of compressed attention, in plain torch (see kernels/ops.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.kernels.indexing import CompressSpec
from headstart.kernels.specs import StreamSpec


def stream_weights(mixes: Tensor, base: Tensor, scale: Tensor, spec: StreamSpec) -> Tensor:
    """Ops.stream_weights, in float32 at least."""
    count, wide = spec.count, torch.promote_types(mixes.dtype, torch.float32)
    parts, bases = mixes.to(wide).split(count, -1), base.to(wide).split(count)
    entering: Tensor = (parts[0] * scale[0] + bases[0]).sigmoid() + spec.eps
    if mixes.shape[-1] == count:
        return entering
    leaving = 2 * (parts[1] * scale[1] + bases[1]).sigmoid()
    square = torch.stack(parts[2:], -2) * scale[2] + torch.stack(bases[2:])
    square = square.softmax(-1) + spec.eps
    square = square / (square.sum(-2, keepdim=True) + spec.eps)
    for _ in range(spec.iterations - 1):
        square = square / (square.sum(-1, keepdim=True) + spec.eps)
        square = square / (square.sum(-2, keepdim=True) + spec.eps)
    return torch.cat((entering, leaving, square.flatten(-2)), dim=-1)


def sum_streams(streams: Tensor, weights: Tensor | None, spec: StreamSpec) -> Tensor:
    """Ops.sum_streams."""
    apart: Tensor = streams.unflatten(-1, (spec.count, -1))
    weighted = apart / spec.count if weights is None else weights[..., : spec.count, None] * apart
    return weighted.sum(-2).to(streams.dtype)


def mix_streams(streams: Tensor, x: Tensor, weights: Tensor, spec: StreamSpec) -> Tensor:
    """Ops.mix_streams."""
    count = spec.count
    leaving, square = weights[..., count : 2 * count], weights[..., 2 * count :].unflatten(-1, (count, count))
    mixed: Tensor = square.transpose(-1, -2).to(streams.dtype) @ streams.unflatten(-1, (count, -1))
    return torch.flatten(leaving[..., None].to(x.dtype) * x[..., None, :] + mixed, -2)


def entries_of(kept: Tensor, there: Tensor, spec: CompressSpec) -> Tensor:
    """Kept rows [N, span, 2 width] of N windows, and which are there -> entries [N, dim] (Ops.compress)."""
    values, gates = kept.split(spec.width, dim=-1)
    if spec.overlap:
        old, new = slice(None, spec.every), slice(spec.every, None)
        values, gates = (
            torch.cat((part[:, old, : spec.dim], part[:, new, spec.dim :]), dim=1) for part in (values, gates)
        )
    wide = torch.promote_types(gates.dtype, torch.float32)
    weights: Tensor = gates.to(wide).masked_fill(~there[..., None], float("-inf")).softmax(1)
    return torch.sum(values * weights.to(values.dtype), 1)
