"""Recurrent layers on the device: their kernels, and what a pass leaves of them (see StateSteps)."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.kernels.cuda.kernels import recurrent as kernels
from headstart.kernels.cuda.launch import Launcher, tile_of
from headstart.kernels.cuda.plan import DevicePlan
from headstart.kernels.states import ConvSpec, DeltaSpec, ScanSpec
from headstart.kernels.torch_backend import StatePool

VALUES = 64
"""Columns of a state that one program walks with, at most."""


def conv(
    launch: Launcher, x: Tensor, weight: Tensor, pool: StatePool, spec: ConvSpec, plan: DevicePlan, bias: Tensor | None
) -> Tensor:
    """Ops.causal_conv."""
    out, tile = torch.empty_like(x), min(tile_of(spec.channels), launch.device.elements)
    states, kept, num_kept = pool.states, pool.rows, pool.rows.shape[1]
    sizes = {"CHANNELS": spec.channels, "WIDTH": spec.width, "TILE": tile}
    tiles, about = -(-spec.channels // tile), (plan["row_starts"], plan["own"], plan["reads"], plan["starts"])
    kernels.conv[(len(x), tiles)](
        x, weight, bias, states, kept, out, plan["positions"], plan["sequences"], *about, num_kept,
        BIAS=bias is not None, **sizes,
    )  # fmt: skip
    if (stores := plan.shape.stores) and spec.width > 1:
        made = launch.empty(stores, spec.width - 1, spec.channels)
        kernels.conv_states[(stores, spec.width - 1, tiles)](
            x, states, kept, made, plan["positions"], *about, plan["store_sequences"], plan["store_positions"],
            num_kept, **sizes,
        )  # fmt: skip
        launch.scatter(made.flatten(1), plan["store_slots"], states.flatten(1))
    _keep(launch, pool, plan, x)
    return out


def gated_delta(
    launch: Launcher, rows: tuple[Tensor, Tensor, Tensor], pool: StatePool, spec: DeltaSpec, plan: DevicePlan
) -> Tensor:
    """Ops.gated_delta of qkv, log decay and strength."""
    out = torch.zeros((len(rows[0]), spec.num_heads * spec.value_dim), device=rows[0].device)
    tile = min(tile_of(spec.value_dim), VALUES)
    kernels.gated_delta[(len(out), spec.num_heads, -(-spec.value_dim // tile))](
        *rows, pool.states, pool.rows, out, *_walk(plan), pool.rows.shape[1], KEY_HEADS=spec.num_key_heads,
        HEADS=spec.num_heads, KEY_DIM=spec.key_dim, VALUE_DIM=spec.value_dim, TILED=spec.tiled,
        KEY_TILE=tile_of(spec.key_dim), VALUE_TILE=tile,
    )  # fmt: skip
    _keep(launch, pool, plan, *rows)
    return out


def selective_scan(
    launch: Launcher, rows: tuple[Tensor, Tensor], rate: Tensor, skip: Tensor, pool: StatePool, spec: ScanSpec,
    plan: DevicePlan,
) -> Tensor:  # fmt: skip
    """Ops.selective_scan of x, B, C and steps."""
    out = torch.zeros((len(rows[0]), spec.inner), device=rows[0].device)
    tile = min(tile_of(spec.head_dim), VALUES)
    kernels.selective_scan[(len(out), spec.num_heads, -(-spec.head_dim // tile))](
        *rows, rate, skip, pool.states, pool.rows, out, *_walk(plan), pool.rows.shape[1], GROUPS=spec.num_groups,
        HEADS=spec.num_heads, STATE=spec.state_dim, DIM=spec.head_dim, STATE_TILE=tile_of(spec.state_dim), TILE=tile,
    )  # fmt: skip
    _keep(launch, pool, plan, *rows)
    return out


def _walk(plan: DevicePlan) -> tuple[Tensor, ...]:
    names = ("positions", "row_starts", "own", "reads", "starts", "store_starts")
    # without stores nobody reads where they go
    stores = ("store_positions", "store_slots") if plan.shape.stores else ("starts", "starts")
    return tuple(plan[name] for name in (*names, *stores))


def _keep(launch: Launcher, pool: StatePool, plan: DevicePlan, *parts: Tensor) -> None:
    """Rows that were drafted, for the next pass; behind all kernels that read those of the last one."""
    _, num_kept, width = pool.rows.shape
    offset = 0
    for part in parts if num_kept else ():
        columns = part.shape[1]
        tile = min(tile_of(columns), launch.device.elements)
        kernels.keep[(len(part), -(-columns // tile))](
            part, plan["keep_owns"], plan["keep_places"], pool.rows, num_kept, columns, offset, width, TILE=tile
        )
        offset += columns
