"""Which outputs of a product are made exact (Ops.refine)."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.kernels.ops import REFINED


def largest(approximate: Tensor, count: int) -> Tensor:
    """[R, width]: True in the `count` blocks of REFINED columns whose largest value is largest, the lower of equals."""
    width = approximate.shape[-1]
    blocks = torch.nn.functional.pad(approximate, (0, -width % REFINED), value=float("-inf")).unflatten(
        -1, (-1, REFINED)
    )
    peaks = blocks.amax(-1)
    best = peaks.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    chosen = torch.zeros_like(peaks, dtype=torch.bool).scatter_(-1, best, True)
    return chosen.repeat_interleave(REFINED, -1)[..., :width]
