"""Mamba2's selective scan over whole sequences with gradients, by chunks (Dao, Gu 2024, section 6): within a chunk that
begins with state S_0, and with g_t the log decays summed up to row t,
    out_t = e^{g_t} S_0^T C_t + sum over i <= t of e^{g_t - g_i} (C_t . B_i) step_i x_i + skip x_t.

Shapes: B sequences of T rows, C rows of a chunk, H heads, N state dim, P head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.kernels.states import ScanSpec

CHUNK = 64


def selective_scan(xbc: Tensor, step: Tensor, rate: Tensor, skip: Tensor, spec: ScanSpec) -> Tensor:
    """Ops.selective_scan of xbc [B, T, channels], step [B, T, H], rate and skip [H] -> [B, T, H * P], from zero
    states."""
    exact = torch.promote_types(xbc.dtype, torch.float32)
    keys, heads = spec.num_groups * spec.state_dim, spec.num_heads
    x, b, c = xbc.to(exact).split((spec.inner, keys, keys), dim=-1)
    x = x.unflatten(-1, (heads, spec.head_dim)).transpose(1, 2)
    group_of = torch.arange(heads, device=xbc.device) // (heads // spec.num_groups)
    b, c = (each.unflatten(-1, (spec.num_groups, -1)).transpose(1, 2)[:, group_of] for each in (b, c))
    steps = step.to(exact).transpose(1, 2)
    rows = (c, b, x * steps[..., None], steps * rate.to(exact)[:, None])
    state = x.new_zeros((*x.shape[:2], spec.state_dim, spec.head_dim))
    outputs: list[Tensor] = []
    for parts in zip(*(each.split(CHUNK, dim=2) for each in rows), strict=True):
        made, state = _chunk(state, *parts)
        outputs.append(made)
    scanned = torch.cat(outputs, dim=2) + skip.to(exact)[:, None, None] * x
    out: Tensor = scanned.transpose(1, 2).flatten(-2).to(xbc.dtype)
    return out


def _chunk(state: Tensor, c: Tensor, b: Tensor, x: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """state [B, H, N, P], rows c, b [B, H, C, N], x [B, H, C, P] times their steps, decay [B, H, C] -> (outputs
    [B, H, C, P], state after them)."""
    total = decay.cumsum(-1)
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=c.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    grown, left = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    outputs = grown * (c @ state) + ((c @ b.mT) * between) @ x
    return outputs, grown[..., -1:, :] * state + (b * left).mT @ x
