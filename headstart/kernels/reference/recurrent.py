"""Recurrent layers in plain torch: all sequences advance together, row by row, by one step function per kind of layer.

Shapes: S sequences, T rows of the longest sequence (kept rows and rows of the pass), W columns of a row.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core import StepPlan
from headstart.kernels.specs import ConvSpec, DeltaSpec, ScanSpec
from headstart.kernels.torch_backend import TorchStatePool

L2_EPSILON = 1e-6
Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(states [S, ...], rows [S, W]) -> (states after the rows, outputs [S, out])."""


def conv_step(weight: Tensor, spec: ConvSpec) -> Step:
    """Ops.causal_conv; a state is the last width - 1 inputs, oldest first."""
    taps = weight.view(spec.width, spec.channels)

    def step(states: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat((states, rows[:, None]), dim=1)
        return window[:, 1:], (window * taps).sum(1)

    return step


def delta_step(spec: DeltaSpec) -> Step:
    """Ops.gated_delta; a state is [heads, key_dim, value_dim]."""
    keys, heads = spec.num_key_heads, spec.num_heads
    head = torch.arange(heads)
    key_of = head % keys if spec.tiled else head // (heads // keys)
    sizes = (keys * spec.key_dim, keys * spec.key_dim, heads * spec.value_dim, spec.num_decays, heads)

    def unit(x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (keys, spec.key_dim))
        normed: Tensor = grouped * torch.rsqrt(grouped.square().sum(-1, keepdim=True) + L2_EPSILON)
        return normed[:, key_of]

    def step(states: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, log_decay, strength = rows.split(sizes, dim=-1)
        unit_q, unit_k = unit(q) * spec.key_dim**-0.5, unit(k)[..., None]
        states = states * log_decay.exp().unflatten(-1, (heads, -1))[..., None]
        known = (states * unit_k).sum(-2)
        new = (v.unflatten(-1, (heads, spec.value_dim)) - known) * strength.sigmoid()[..., None]
        states = states + unit_k * new[..., None, :]
        return states, (states * unit_q[..., None]).sum(-2).flatten(-2)

    return step


def scan_step(spec: ScanSpec, rate: Tensor, skip: Tensor) -> Step:
    """Ops.selective_scan; a state is [heads, state_dim, head_dim]."""
    groups, heads = spec.num_groups, spec.num_heads
    group_of = torch.arange(heads) // (heads // groups)
    sizes = (spec.inner, groups * spec.state_dim, groups * spec.state_dim, heads)

    def step(states: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        x, b, c, steps = rows.split(sizes, dim=-1)
        x = x.unflatten(-1, (heads, spec.head_dim))
        b, c = (each.unflatten(-1, (groups, spec.state_dim))[:, group_of] for each in (b, c))
        states = states * (rate * steps).exp()[..., None, None]
        states = states + b[..., None] * (x * steps[..., None])[..., None, :]
        return states, ((states * c[..., None]).sum(-2) + skip[:, None] * x).flatten(-2)

    return step


def walk(step: Step, rows: Tensor, width: int, pool: TorchStatePool, plan: StepPlan) -> Tensor:
    """rows [R, W] -> outputs [R, width]; reads and writes states as plan.states says."""
    steps, num_rows = plan.states, len(rows)
    assert steps is not None, "the plan has no states for a recurrent layer"
    firsts = plan.positions[plan.row_starts[:-1]]
    replayed = firsts - steps.starts
    lengths = replayed + np.diff(plan.row_starts)
    order = np.argsort(-lengths, kind="stable")  # sequences with rows left come first
    kept = pool.rows[_longs(steps.own)].flatten(0, 1) if pool.rows.numel() else pool.rows.flatten(0, 1)
    out = rows.new_empty((num_rows, width))
    rows = rows.to(pool.rows.dtype)  # at least float32
    source = torch.cat((rows, kept))
    index = _sources(plan, replayed, lengths, num_rows, pool.rows.shape[1])[order]
    stores = _stores(plan, order)
    reads = torch.from_numpy(steps.reads[order].astype(np.int64))
    states = pool.states.new_zeros((len(order), *pool.states.shape[1:]))
    states[reads >= 0] = pool.states[reads[reads >= 0]]
    for t in range(int(lengths.max()) + 1):
        for place, slot in stores.get(t, ()):
            pool.states[slot] = states[place]
        num_active = int((lengths > t).sum())
        if num_active:
            taken = index[:num_active, t]
            advanced, outputs = step(states[:num_active], source[taken])
            states = torch.cat((advanced, states[num_active:]))
            is_new = taken < num_rows
            out[taken[is_new]] = outputs[is_new].to(out.dtype)
    _keep(rows, pool, plan)
    return out


def _longs(values: NDArray[np.int32]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def _sources(
    plan: StepPlan, replayed: NDArray[np.int32], lengths: NDArray[np.int32], num_rows: int, num_kept: int
) -> Tensor:
    """int64 [S, T]: each sequence's row at each step, as an index into [rows of the pass; kept rows of each]."""
    steps = np.arange(lengths.max())[None]
    kept = num_rows + np.arange(len(lengths))[:, None] * num_kept + steps
    new = plan.row_starts[:-1, None] + steps - replayed[:, None]
    return _longs(np.where(steps < replayed[:, None], kept, new))


def _stores(plan: StepPlan, order: NDArray[np.int64]) -> dict[int, list[tuple[int, int]]]:
    """Number of processed rows -> (index in `order`, slot) of the states to write then."""
    steps = plan.states
    assert steps is not None
    found: dict[int, list[tuple[int, int]]] = {}
    for place, s in enumerate(order):
        for i in range(steps.store_starts[s], steps.store_starts[s + 1]):
            num_done = int(steps.store_positions[i] - steps.starts[s])
            found.setdefault(num_done, []).append((place, int(steps.store_slots[i])))
    return found


def _keep(rows: Tensor, pool: TorchStatePool, plan: StepPlan) -> None:
    """Keep the rows after each sequence's state for the next pass."""
    steps = plan.states
    assert steps is not None
    sequences = plan.sequences
    places = plan.positions - steps.keeps[sequences]
    drafted = places >= 0
    if not drafted.any():
        return
    pool.rows[_longs(steps.own[sequences][drafted]), _longs(places[drafted])] = rows[torch.from_numpy(drafted)]
