"""The recurrent layers over whole sequences with gradients, many rows at a time.

Gated DeltaNet by chunks (Yang, Kautz, Hatamizadeh 2024, section 3.3): within a chunk that begins with state S_0, and
with g_t the log decays summed up to row t,
    u_t = b_t (v_t - e^{g_t} S_0^T k_t - sum over i < t of e^{g_t - g_i} (k_t . k_i) u_i)
is a unit-triangular system; out_t = e^{g_t} S_0^T q_t + sum over i <= t of e^{g_t - g_i} (q_t . k_i) u_i.

Shapes: B sequences of T rows, C rows of a chunk, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.kernels.reference.recurrent import L2_EPSILON
from headstart.kernels.states import ConvSpec, DeltaSpec

CHUNK = 64


def causal_conv(x: Tensor, weight: Tensor, spec: ConvSpec) -> Tensor:
    """Ops.causal_conv of x [B, T, channels], from zero states."""
    num_rows, taps = x.shape[1], weight.view(spec.width, spec.channels)
    behind = pad(x, (0, 0, spec.width - 1, 0))
    total = behind[:, :num_rows] * taps[0]
    for j in range(1, spec.width):
        total = total + behind[:, j : j + num_rows] * taps[j]
    return total


def gated_delta(qkv: Tensor, log_decay: Tensor, strength: Tensor, spec: DeltaSpec) -> Tensor:
    """Ops.gated_delta of qkv [B, T, channels], log_decay and strength [B, T, H] -> [B, T, H * V], from zero states."""
    exact = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = _heads(qkv.to(exact), spec)
    decays, strengths = (x.to(exact).transpose(1, 2) for x in (log_decay, strength.sigmoid()))
    state = v.new_zeros((*v.shape[:2], spec.key_dim, spec.value_dim))
    outputs = []
    for parts in zip(*(x.split(CHUNK, dim=2) for x in (q, k, v, decays, strengths)), strict=True):
        made, state = _chunk(state, *parts)
        outputs.append(made)
    return torch.cat(outputs, dim=2).transpose(1, 2).flatten(-2).to(qkv.dtype)


def _heads(qkv: Tensor, spec: DeltaSpec) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of length 1 (q / sqrt(K)) and v, each [B, H, T, K or V]."""
    keys, heads = spec.num_key_heads, spec.num_heads
    width = keys * spec.key_dim
    head = torch.arange(heads, device=qkv.device)
    key_of = head % keys if spec.tiled else head // (heads // keys)
    q, k, v = qkv.split((width, width, heads * spec.value_dim), dim=-1)

    def unit(x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (keys, spec.key_dim)).transpose(1, 2)
        normed: Tensor = grouped * torch.rsqrt(grouped.square().sum(-1, keepdim=True) + L2_EPSILON)
        return normed[:, key_of]

    return unit(q) * spec.key_dim**-0.5, unit(k), v.unflatten(-1, (heads, spec.value_dim)).transpose(1, 2)


def _chunk(state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
    """state [B, H, K, V], rows q, k [B, H, C, K], v [B, H, C, V], decay, strength [B, H, C] -> (outputs [B, H, C, V],
    state after them)."""
    total = decay.cumsum(-1)
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=q.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    grown, strength = total.exp()[..., None], strength[..., None]
    links = (strength * (k @ k.mT) * between).tril(-1)
    new = torch.linalg.solve_triangular(links, strength * (v - grown * (k @ state)), upper=False, unitriangular=True)
    outputs = grown * (q @ state) + ((q @ k.mT) * between) @ new
    left = (total[..., -1:] - total).exp()[..., None]
    return outputs, grown[..., -1:, :] * state + (k * left).mT @ new
