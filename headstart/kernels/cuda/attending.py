"""Calls of attention's kernels, of an indexer's, and of the entries of compressed attention. What decides an order of
sums is a function of an attention's own shape. Shapes: R rows, H heads, V features of a value."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from headstart.kernels.cuda.kernels import attention, choice, streams as stream_kernels
from headstart.kernels.cuda.launch import ROWS, Launcher, tile_of
from headstart.kernels.cuda.plan import DevicePlan
from headstart.kernels.indexing import CompressSpec, IndexSpec
from headstart.kernels.ops import AttentionSpec
from headstart.kernels.torch_backend import KVPool

SPLIT, BLOCK = 512, 64
"""Positions that one program of attention sums, as many as native's stretches; and those of a step."""
ALL, ENDS, CHOSEN = range(3)
"""As in kernels/attention.py."""


@dataclass(frozen=True, eq=False)
class Listed:
    """Which positions rows attend to, `width` at most: the last of each window of `every`, or `chosen` [R, width], of
    which a row has `counts` [R]."""

    kind: int
    width: int
    every: int = 1
    chosen: Tensor | None = None
    counts: Tensor | None = None

    @property
    def splits(self) -> int:
        return -(-self.width // SPLIT)


class Stretches:
    """What attention leaves of each stretch, for `join`."""

    def __init__(self, launch: Launcher, q: Tensor, spec: AttentionSpec, plan: DevicePlan, count: int) -> None:
        self._launch, self._q, self._spec, self._plan, self._count = launch, q, spec, plan, count
        rows, heads = plan.shape.rows, spec.num_heads
        self._parts = launch.empty(rows, heads, count, spec.value_width)
        self._maxima, self._totals = launch.empty(rows, heads, count), launch.empty(rows, heads, count)

    def add(self, pool: KVPool, listed: Listed, first: int, *, window: int = 0, chunk: int = 0) -> None:
        """Positions of a list, from stretch `first` on."""
        spec, plan, launch, keys, values = self._spec, self._plan, self._launch, pool.keys, pool.values
        shape, heads, group = plan.shape, spec.num_heads, spec.num_heads // spec.num_kv_heads
        tile_heads = gcd(group, ROWS) if group > ROWS else group
        tile_rows, tile_counts = plan.tiles(1 if listed.kind == CHOSEN else ROWS // tile_heads)
        wide = keys.dtype != torch.bfloat16 or not launch.narrow
        attention.attend[(shape.rows, heads // tile_heads, listed.splits)](
            self._q, keys, values, self._parts, self._maxima, self._totals, plan["positions"], plan["sees"],
            plan["sequences"], plan["tables"], tile_rows, tile_counts, plan["path_starts"], plan["path_slots"],
            listed.chosen, listed.counts, shape.first_position, shape.blocks, listed.width, spec.scale,
            shape.block_size, self._count, first, HEADS=heads, KV_HEADS=spec.num_kv_heads, DIM=spec.head_dim,
            VALUE_DIM=spec.value_width, KEY_STRIDE=keys.stride(0), VALUE_STRIDE=values.stride(0),
            VALUE_HEAD=values.stride(1), TILE_HEADS=tile_heads, WINDOW=window, CHUNK=chunk, SOFTCAP=spec.softcap,
            MODE=_mode(spec), LIST=listed.kind, EVERY=listed.every, PATHS=shape.paths > 0, ROUND=not wide,
            WIDE=launch.device.wide or wide, BLOCK=BLOCK, STEP=max(gcd(spec.head_dim, 64), 16),
            VALUE_TILE=_value_tile(spec), SPLIT=SPLIT,
        )  # fmt: skip

    def join(self, listed: Listed, first: int, sinks: Tensor | None, *, dense: bool) -> Tensor:
        """[R, H * V] of all stretches: those of positions if `dense`, then those of a list."""
        spec, plan, launch = self._spec, self._plan, self._launch
        shape, heads, value_tile = plan.shape, spec.num_heads, _value_tile(spec)
        out, head_tile = launch.empty(shape.rows, heads * spec.value_width), min(
            tile_of(heads), max(4096 // value_tile, 1)
        )  # fmt: skip
        attention.join[(shape.rows, -(-heads // head_tile))](
            self._parts, self._maxima, self._totals, sinks, out, plan["positions"], plan["sees"], listed.counts,
            shape.first_position, self._count, first, HEADS=heads, VALUE_DIM=spec.value_width,
            WINDOW=spec.window if dense else 0, CHUNK=spec.chunk if dense else 0, MODE=_mode(spec), DENSE=dense,
            LIST=listed.kind, EVERY=listed.every, SINKS=sinks is not None, HEAD_TILE=head_tile, VALUE_TILE=value_tile,
            SPLIT=SPLIT,
        )  # fmt: skip
        return out


def _mode(spec: AttentionSpec) -> int:
    return 2 if spec.before else 1 if spec.causal else 0


def _value_tile(spec: AttentionSpec) -> int:
    return max(tile_of(spec.value_width), 16)


def attend(
    launch: Launcher, q: Tensor, pool: KVPool, spec: AttentionSpec, plan: DevicePlan, sinks: Tensor | None,
    listed: Listed | None,
) -> Tensor:  # fmt: skip
    """Ops.attend: q [R, H * D] over keys and values by slot -> [R, H * V]."""
    whole = listed or Listed(ALL, plan.shape.context)
    made = Stretches(launch, q, spec, plan, whole.splits)
    window, chunk = (0, 0) if listed else (spec.window, spec.chunk)
    made.add(pool, whole, 0, window=window, chunk=chunk)
    return made.join(whole, 0, sinks, dense=listed is None)


def attend_beside(
    launch: Launcher, q: Tensor, pools: tuple[KVPool, KVPool], spec: AttentionSpec, plan: DevicePlan,
    sinks: Tensor | None, listed: Listed,
) -> Tensor:  # fmt: skip
    """Ops.attend_beside, of keys and entries."""
    whole = Listed(ALL, plan.shape.context)
    made = Stretches(launch, q, spec, plan, whole.splits + listed.splits)
    made.add(pools[0], whole, 0, window=spec.window, chunk=spec.chunk)
    made.add(pools[1], listed, whole.splits)
    return made.join(listed, whole.splits, sinks, dense=True)


def ends_of(plan: DevicePlan, every: int) -> Listed:
    """The last positions of all windows."""
    return Listed(ENDS, max(plan.shape.context // every, 1), every)


def choose(launch: Launcher, q: Tensor, weights: Tensor, pool: KVPool, spec: IndexSpec, plan: DevicePlan) -> Listed:
    """Ops.choose."""
    shape, rows, keys = plan.shape, len(q), pool.keys
    wide, context = keys.dtype != torch.bfloat16 or not launch.narrow, shape.context
    scores, width = launch.empty(rows, context), min(spec.top_k, context)
    seen = (plan["positions"], plan["sees"])
    choice.score[(rows, -(-context // BLOCK))](
        q, weights, keys, scores, *seen, plan["sequences"], plan["tables"], plan["path_starts"], plan["path_slots"],
        shape.first_position, shape.blocks, shape.block_size, context, HEADS=spec.num_heads, DIM=spec.head_dim,
        PATHS=shape.paths > 0, ROUND=not wide, WIDE=launch.device.wide or wide, BLOCK=BLOCK,
        STEP=max(gcd(spec.head_dim, 64), 16),
    )  # fmt: skip
    chosen, counts = (torch.zeros(shape, dtype=torch.int32, device=q.device) for shape in ((rows, width), (rows,)))
    choice.choose[(rows,)](
        scores, chosen, counts, *seen, shape.first_position, context, width, width, EVERY=spec.every,
        TILE=min(tile_of(context), launch.device.elements),
    )  # fmt: skip
    return Listed(CHOSEN, width, chosen=chosen, counts=counts)


def compress(
    launch: Launcher, values: Tensor, gates: Tensor, bias: Tensor, pool: KVPool, spec: CompressSpec, plan: DevicePlan
) -> Tensor:
    """Ops.compress."""
    shape, rows, most = plan.shape, len(values), launch.device.elements
    tile = min(tile_of(spec.width), most)
    stream_kernels.keep_gated[(rows, -(-spec.width // tile))](
        values, gates, bias, plan["positions"], plan["slots"], pool.keys, EVERY=spec.every, WIDTH=spec.width, TILE=tile
    )
    out, tile = launch.empty(rows, spec.dim), min(tile_of(spec.dim), most)
    stream_kernels.compress[(rows, -(-spec.dim // tile))](
        pool.keys, out, plan["positions"], plan["sees"], plan["sequences"], plan["tables"], plan["path_starts"],
        plan["path_slots"], shape.first_position, shape.blocks, shape.block_size, EVERY=spec.every, DIM=spec.dim,
        OVERLAP=spec.overlap, PATHS=shape.paths > 0, TILE=tile,
    )  # fmt: skip
    return out
