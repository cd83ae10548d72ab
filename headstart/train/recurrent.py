"""Recurrent layers over whole sequences with gradients, in chunks of rows, from zero states.

Within a chunk that begins with state S_0, and with g_t the log decays summed up to row t:

Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, section 3.3) solves the unit-triangular system
    u_t = b_t (v_t - e^{g_t} S_0^T k_t - sum over i < t of e^{g_t - g_i} (k_t . k_i) u_i),
    out_t = e^{g_t} S_0^T q_t + sum over i <= t of e^{g_t - g_i} (q_t . k_i) u_i.
With a decay for each key feature (Kimi Linear, arXiv 2510.26692, section 3) the factors stand inside the dot products.
Mamba2's selective scan (Dao, Gu 2024, section 6):
    out_t = e^{g_t} S_0^T C_t + sum over i <= t of e^{g_t - g_i} (C_t . B_i) step_i x_i + skip x_t.

Shapes: B sequences of T rows, C rows of a chunk, H (value) heads, K key dim (N state dim), V value dim (P head dim).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from headstart.kernels.reference.recurrent import L2_EPSILON
from headstart.kernels.specs import ConvSpec, DeltaSpec, ScanSpec

CHUNK = 64
CHANNEL_CHUNK = 16  # of decays by key feature, whose factors are C x C x K


def causal_conv(x: Tensor, weight: Tensor, spec: ConvSpec) -> Tensor:
    """Ops.causal_conv of x [B, T, channels]."""
    num_rows, taps = x.shape[1], weight.view(spec.width, spec.channels)
    padded = pad(x, (0, 0, spec.width - 1, 0))
    total = padded[:, :num_rows] * taps[0]
    for j in range(1, spec.width):
        total = total + padded[:, j : j + num_rows] * taps[j]
    return total


def gated_delta(qkv: Tensor, log_decay: Tensor, strength: Tensor, spec: DeltaSpec) -> Tensor:
    """Ops.gated_delta of qkv [B, T, channels], log_decay [B, T, num_decays], strength [B, T, H] -> [B, T, H * V]."""
    exact = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = _delta_heads(qkv.to(exact), spec)
    decays, strengths = (x.to(exact).transpose(1, 2) for x in (log_decay, strength.sigmoid()))
    if spec.by_channel:
        decays = log_decay.to(exact).unflatten(-1, (spec.num_heads, -1)).transpose(1, 2)
    run, size = (_channel_chunk, CHANNEL_CHUNK) if spec.by_channel else (_delta_chunk, CHUNK)
    state = v.new_zeros((*v.shape[:2], spec.key_dim, spec.value_dim))
    outputs = []
    for parts in zip(*(x.split(size, dim=2) for x in (q, k, v, decays, strengths)), strict=True):
        chunk, state = run(state, *parts)
        outputs.append(chunk)
    return torch.cat(outputs, dim=2).transpose(1, 2).flatten(-2).to(qkv.dtype)


def _delta_heads(qkv: Tensor, spec: DeltaSpec) -> tuple[Tensor, Tensor, Tensor]:
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


def _delta_chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor]:
    """state [B, H, K, V], rows q, k [B, H, C, K], v [B, H, C, V], decay, strength [B, H, C] -> (outputs [B, H, C, V],
    state after the chunk)."""
    between, grown, left = _decay_factors(decay)
    strength = strength[..., None]
    links = (strength * (k @ k.mT) * between).tril(-1)
    new = torch.linalg.solve_triangular(links, strength * (v - grown * (k @ state)), upper=False, unitriangular=True)
    outputs = grown * (q @ state) + ((q @ k.mT) * between) @ new
    return outputs, grown[..., -1:, :] * state + (k * left).mT @ new


def _channel_chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor]:
    """_delta_chunk with decay [B, H, C, K]."""
    total, strength = decay.cumsum(-2), strength[..., None]
    later = torch.ones(total.shape[-2], total.shape[-2], dtype=torch.bool, device=decay.device).triu(1)
    between = (total[..., :, None, :] - total[..., None, :, :]).masked_fill(later[..., None], float("-inf")).exp()
    grown, faded = total.exp(), k[..., None, :, :] * between  # faded [B, H, t, i, K]: k_i as row t sees it
    links = (strength * (k[..., None, :] * faded).sum(-1)).tril(-1)
    new = torch.linalg.solve_triangular(links, strength * (v - (grown * k) @ state), upper=False, unitriangular=True)
    outputs = (grown * q) @ state + (q[..., None, :] * faded).sum(-1) @ new
    return outputs, grown[..., -1, :, None] * state + faded[..., -1, :, :].mT @ new


def selective_scan(xbc: Tensor, step: Tensor, rate: Tensor, skip: Tensor, spec: ScanSpec) -> Tensor:
    """Ops.selective_scan of xbc [B, T, channels], step [B, T, H], rate and skip [H] -> [B, T, H * P]."""
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
        chunk, state = _scan_chunk(state, *parts)
        outputs.append(chunk)
    scanned = torch.cat(outputs, dim=2) + skip.to(exact)[:, None, None] * x
    out: Tensor = scanned.transpose(1, 2).flatten(-2).to(xbc.dtype)
    return out


def _scan_chunk(state: Tensor, c: Tensor, b: Tensor, x: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """state [B, H, N, P], rows c, b [B, H, C, N], x [B, H, C, P] times the steps, decay [B, H, C] -> (outputs
    [B, H, C, P], state after the chunk)."""
    between, grown, left = _decay_factors(decay)
    outputs = grown * (c @ state) + ((c @ b.mT) * between) @ x
    return outputs, grown[..., -1:, :] * state + (b * left).mT @ x


def _decay_factors(decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log decays [B, H, C] -> factors from row i to row t [B, H, C, C] (0 for i > t), from the chunk's start to each
    row [B, H, C, 1], and from each row to the chunk's end [B, H, C, 1]."""
    total = decay.cumsum(-1)
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=decay.device).triu(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    return between, total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
