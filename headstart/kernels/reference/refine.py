"""Which outputs of a product are made exact (Ops.refine), and which groups of outputs are kept (Ops.keep_groups)."""

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
    return best(blocks.amax(-1), count).repeat_interleave(REFINED, -1)[..., :width]


def best(values: Tensor, count: int) -> Tensor:
    """[R, n]: True at the `count` largest values, the lower of equals."""
    first = values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(values, dtype=torch.bool).scatter_(-1, first, True)
