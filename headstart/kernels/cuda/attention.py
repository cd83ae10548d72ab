"""Launches the kernels of attention and of compressed KV entries.

Whatever decides an order of sums depends on the attention's shape only. Shapes: R rows, H heads, V features of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from headstart.kernels.cuda.kernels import attention as kernels
from headstart.kernels.cuda.launch import TILE_ROWS, KernelLauncher, tile_size
from headstart.kernels.cuda.plan import DevicePlan
from headstart.kernels.ops import AttentionSpec
from headstart.kernels.specs import CompressSpec
from headstart.kernels.torch_backend import TorchKVPool

SPLIT, BLOCK = 512, 64  # positions that one program sums (the same as native's), and positions of one step
ALL, WINDOW_ENDS, CHOSEN = range(3)  # kinds of position lists (see kernels/attention.py)


@dataclass(frozen=True, eq=False)
class PositionList:
    """The positions that rows attend to."""

    kind: int  # ALL, WINDOW_ENDS or CHOSEN
    width: int  # positions of a row, at most
    every: int = 1  # WINDOW_ENDS: window size
    chosen: Tensor | None = None  # CHOSEN: int32 [R, G, width], ascending; one list for each of G groups of kv heads
    counts: Tensor | None = None  # CHOSEN: int32 [R] positions in each of a row's lists

    @property
    def splits(self) -> int:
        return -(-self.width // SPLIT)


class AttentionSplits:
    """Partial softmax sums of each split of the positions, and their join."""

    def __init__(self, launch: KernelLauncher, q: Tensor, spec: AttentionSpec, plan: DevicePlan, count: int) -> None:
        self._launch, self._q, self._spec, self._plan, self._count = launch, q, spec, plan, count
        self._window_ends = plan["block_starts" if spec.block_window else "positions"]
        rows, heads = plan.shape.rows, spec.num_heads
        self._parts = launch.empty(rows, heads, count, spec.value_width)
        self._maxima, self._totals = launch.empty(rows, heads, count), launch.empty(rows, heads, count)

    def add(
        self, pool: TorchKVPool, positions: PositionList, first: int, bias: Tensor | None = None, *, window: int = 0,
        chunk: int = 0,
    ) -> None:  # fmt: skip
        """Compute the splits of a list of positions, stored from split `first` on."""
        spec, plan, launch, keys, values = self._spec, self._plan, self._launch, pool.keys, pool.values
        shape, heads, group = plan.shape, spec.num_heads, spec.num_heads // spec.num_kv_heads
        tile_heads = gcd(group, TILE_ROWS) if group > TILE_ROWS else group
        tile_rows, tile_counts = plan.tiles(1 if positions.kind == CHOSEN else TILE_ROWS // tile_heads)
        wide = keys.dtype != torch.bfloat16 or not launch.narrow
        kernels.attend[(shape.rows, heads // tile_heads, positions.splits)](
            self._q, keys, values, self._parts, self._maxima, self._totals, plan["positions"], plan["visible_end"],
            self._window_ends, plan["sequences"], plan["tables"], tile_rows, tile_counts, plan["path_starts"],
            plan["path_slots"], positions.chosen, positions.counts, bias, shape.first_position, shape.blocks,
            positions.width, spec.scale, shape.block_size, self._count, first, HEADS=heads, KV_HEADS=spec.num_kv_heads,
            DIM=spec.head_dim, VALUE_DIM=spec.value_width, KEY_STRIDE=keys.stride(0), VALUE_STRIDE=values.stride(0),
            VALUE_HEAD=values.stride(1), TILE_HEADS=tile_heads, WINDOW=window, CHUNK=chunk, SOFTCAP=spec.softcap,
            MODE=_mode(spec), LIST=positions.kind, EVERY=positions.every, PATHS=shape.paths > 0, ROUND=not wide,
            GROUPS=1 if positions.chosen is None else positions.chosen.shape[1],
            EXTENT=0 if bias is None else bias.shape[1] // heads,
            WIDE=launch.device.wide or wide, BLOCK=BLOCK, STEP=max(gcd(spec.head_dim, 64), 16),
            VALUE_TILE=_value_tile(spec), SPLIT=SPLIT,
        )  # fmt: skip

    def join(self, positions: PositionList, first: int, sinks: Tensor | None, *, dense: bool) -> Tensor:
        """Add all splits in order -> [R, H * V]. dense: the splits before `first` are those of all positions."""
        spec, plan, launch = self._spec, self._plan, self._launch
        shape, heads, value_tile = plan.shape, spec.num_heads, _value_tile(spec)
        out = launch.empty(shape.rows, heads * spec.value_width)
        head_tile = min(tile_size(heads), max(4096 // value_tile, 1))
        kernels.join[(shape.rows, -(-heads // head_tile))](
            self._parts, self._maxima, self._totals, sinks, out, plan["positions"], plan["visible_end"],
            self._window_ends, positions.counts, shape.first_position, self._count, first, HEADS=heads,
            VALUE_DIM=spec.value_width, WINDOW=spec.window if dense else 0, CHUNK=spec.chunk if dense else 0,
            MODE=_mode(spec), DENSE=dense, LIST=positions.kind, EVERY=positions.every, SINKS=sinks is not None,
            HEAD_TILE=head_tile, VALUE_TILE=value_tile, SPLIT=SPLIT,
        )  # fmt: skip
        return out


def _mode(spec: AttentionSpec) -> int:
    """How the last visible position is determined (see kernels/attention.py)."""
    return 2 if spec.excludes_self else 1 if spec.causal else 0


def _value_tile(spec: AttentionSpec) -> int:
    return max(tile_size(spec.value_width), 16)


def compress(
    launch: KernelLauncher, values: Tensor, gates: Tensor, bias: Tensor, pool: TorchKVPool, spec: CompressSpec,
    plan: DevicePlan,
) -> Tensor:  # fmt: skip
    """Ops.compress."""
    shape, rows, max_tile = plan.shape, len(values), launch.device.elements
    tile = min(tile_size(spec.width), max_tile)
    kernels.keep_gated[(rows, -(-spec.width // tile))](
        values, gates, bias, plan["positions"], plan["slots"], pool.keys, shape.first_position, EVERY=spec.every,
        WIDTH=spec.width, TILE=tile,
    )  # fmt: skip
    out, tile = launch.empty(rows, spec.dim), min(tile_size(spec.dim), max_tile)
    kernels.compress[(rows, -(-spec.dim // tile))](
        pool.keys, out, plan["positions"], plan["visible_end"], plan["sequences"], plan["tables"], plan["path_starts"],
        plan["path_slots"], shape.first_position, shape.blocks, shape.block_size, EVERY=spec.every, DIM=spec.dim,
        OVERLAP=spec.overlap, PATHS=shape.paths > 0, TILE=tile,
    )  # fmt: skip
    return out
