"""Calls of the kernels: their grids, tiles and buffers. All that decides an order of sums is a function of a matrix's
or an attention's own shape. Shapes: R rows, N outputs, K inputs, H heads, V features of a value."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from headstart.kernels.cuda.device import Device
from headstart.kernels.cuda.kernels import attention, products, rows as row_kernels
from headstart.kernels.cuda.matrix import Matrix
from headstart.kernels.cuda.plan import DevicePlan
from headstart.kernels.ops import AttentionSpec

ROWS = 16
WANTED_PROGRAMS, LEAST_PART = 256, 512
"""K is taken apart until a product has about so many tiles of 64 outputs, into parts no shorter than that."""
SPLIT = 512
"""Positions that one program of attention sums; as many as native's stretches."""


def tile_of(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()


@dataclass(frozen=True)
class Parts:
    """How K is walked: columns of a step, of a part, and how many parts."""

    step: int
    length: int
    count: int

    @classmethod
    def of(cls, matrix: Matrix) -> Parts:
        step = gcd(matrix.group, 64) if 0 < matrix.group < matrix.columns else 64
        wanted = min(WANTED_PROGRAMS // max(-(-matrix.rows // 64), 1), matrix.columns // LEAST_PART)
        unit = max(step, matrix.group if matrix.group < matrix.columns else step)
        length = -(-matrix.columns // max(wanted, 1) // unit) * unit if wanted > 1 else matrix.columns
        length = -(-length // unit) * unit
        return cls(step, length, -(-matrix.columns // length))


class Launcher:
    """Kernels on one device. `narrow`: rows meet matrices as bfloat16, on tensor cores, where the numbers of the matrix
    allow it; else in float32."""

    def __init__(self, device: Device, *, narrow: bool) -> None:
        self.device, self.narrow = device, narrow

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device.place)

    def product(self, x: Tensor, matrix: Matrix, bias: Tensor | None = None, sums: Tensor | None = None) -> Tensor:
        """x [R, K] -> [R, N]. `sums`: of x by the matrix's groups, where they are known."""
        count, parts = len(x), Parts.of(matrix)
        narrow = self.narrow and not matrix.wide
        if matrix.offsets is not None and sums is None:
            sums = self.group_sums(x, matrix, narrow=narrow)
        out = self.empty(parts.count, count, matrix.rows) if parts.count > 1 else self.empty(count, matrix.rows)
        columns = min(tile_of(matrix.rows), self.device.columns)
        grid = (-(-matrix.rows // columns), -(-count // ROWS), parts.count)
        products.product[grid](
            x, matrix.codes, matrix.scales, matrix.offsets, sums, matrix.levels, bias if parts.count == 1 else None,
            out, count, matrix.rows, matrix.columns, matrix.units, parts.length,
            KIND=matrix.kind, ZERO=matrix.zero, GROUP=matrix.group, OFFSETS=matrix.offsets is not None,
            BIAS=bias is not None and parts.count == 1, ROUND=narrow, WIDE=self.device.wide or not narrow,
            COLUMNS=max(columns, 16), STEP=parts.step,
        )  # fmt: skip
        return self._joined(out, bias) if parts.count > 1 else out

    def _joined(self, parts: Tensor, bias: Tensor | None) -> Tensor:
        count, rows, columns = parts.shape
        out = self.empty(rows, columns)
        size = out.numel()
        self.each(products.join_parts, size, parts, bias, out, size, columns, count, BIAS=bias is not None)
        return out

    def group_sums(self, x: Tensor, matrix: Matrix, *, narrow: bool) -> Tensor:
        sums, units = self.empty(len(x), matrix.units), min(tile_of(matrix.units), 64)
        products.group_sums[(len(x), -(-matrix.units // units))](
            x, sums, matrix.columns, matrix.units, GROUP=matrix.group, WIDTH=tile_of(matrix.group), UNITS=units,
            ROUND=narrow,
        )  # fmt: skip
        return sums

    def take(self, matrix: Matrix, ids: Tensor) -> Tensor:
        """Rows [R, K] of a matrix."""
        out, width = self.empty(len(ids), matrix.columns), min(tile_of(matrix.columns), 4096)
        products.take[(len(ids), -(-matrix.columns // width))](
            matrix.codes, matrix.scales, matrix.offsets, matrix.levels, ids, out, matrix.columns, matrix.units,
            KIND=matrix.kind, ZERO=matrix.zero, GROUP=matrix.group, OFFSETS=matrix.offsets is not None, WIDTH=width,
        )  # fmt: skip
        return out

    def norm(
        self, x: Tensor, weight: Tensor, eps: float, num_parts: int, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(normed, x + residual) of x [R, W]."""
        columns = x.shape[1]
        width = weight.numel() // num_parts
        out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
        row_kernels.norm[(len(x),)](
            x, residual, weight, out, total, columns, eps, num_parts, WIDTH=width, GROUPS=columns // width,
            GROUP_TILE=tile_of(columns // width), TILE=tile_of(width), RESIDUAL=residual is not None,
        )  # fmt: skip
        return out, total

    def each(self, kernel: Any, size: int, *arguments: Any, **about: Any) -> None:
        """A kernel over `size` elements."""
        count = self.device.elements
        kernel[(-(-size // count),)](*arguments, COUNT=count, **about)

    def scatter(self, x: Tensor, slots: Tensor, pool: Tensor) -> None:
        """Rows of x [R, W] to pool [slots, W]."""
        columns = x.shape[1]
        tile = min(tile_of(columns), 4096)
        row_kernels.scatter[(len(x), -(-columns // tile))](x, slots, pool, columns, TILE=tile)

    def attend(
        self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, plan: DevicePlan, sinks: Tensor | None
    ) -> Tensor:
        """q [R, H * D] over keys and values by slot [slots, ...] -> [R, H * V]."""
        shape, heads, group = plan.shape, spec.num_heads, spec.num_heads // spec.num_kv_heads
        tile_heads = gcd(group, ROWS) if group > ROWS else group
        tile_rows, tile_counts = plan.tiles(ROWS // tile_heads)
        splits, wide = -(-shape.context // SPLIT), keys.dtype != torch.bfloat16 or not self.narrow
        parts = self.empty(shape.rows, heads, splits, spec.value_width)
        maxima, totals = self.empty(shape.rows, heads, splits), self.empty(shape.rows, heads, splits)
        value_tile, mode = max(tile_of(spec.value_width), 16), 2 if spec.before else 1 if spec.causal else 0
        attention.attend[(shape.rows, heads // tile_heads, splits)](
            q, keys, values, parts, maxima, totals, plan["positions"], plan["sees"], plan["sequences"], plan["tables"],
            tile_rows, tile_counts, plan["path_starts"], plan["path_slots"], shape.first_position, shape.blocks,
            spec.scale, shape.block_size, splits, HEADS=heads, KV_HEADS=spec.num_kv_heads, DIM=spec.head_dim,
            VALUE_DIM=spec.value_width, KEY_STRIDE=keys.stride(0), VALUE_STRIDE=values.stride(0),
            VALUE_HEAD=values.stride(1), TILE_HEADS=tile_heads, WINDOW=spec.window, CHUNK=spec.chunk,
            SOFTCAP=spec.softcap, MODE=mode, PATHS=shape.paths > 0,
            ROUND=not wide, WIDE=self.device.wide or wide, BLOCK=64, STEP=max(gcd(spec.head_dim, 64), 16),
            VALUE_TILE=value_tile, SPLIT=SPLIT,
        )  # fmt: skip
        out = self.empty(shape.rows, heads * spec.value_width)
        head_tile = min(tile_of(heads), max(4096 // value_tile, 1))
        attention.join[(shape.rows, -(-heads // head_tile))](
            parts, maxima, totals, sinks, out, plan["positions"], plan["sees"], shape.first_position, splits,
            HEADS=heads, VALUE_DIM=spec.value_width, WINDOW=spec.window, CHUNK=spec.chunk, MODE=mode,
            SINKS=sinks is not None, HEAD_TILE=head_tile, VALUE_TILE=value_tile, SPLIT=SPLIT,
        )  # fmt: skip
        return out
