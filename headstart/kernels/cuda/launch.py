"""Calls of the kernels: their grids, tiles and buffers. All that decides an order of sums is a function of a matrix's
own shape. Shapes: R rows, N outputs, K inputs."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from headstart.kernels.cuda.device import Device
from headstart.kernels.cuda.kernels import products, rows as row_kernels
from headstart.kernels.cuda.matrix import Matrix

ROWS = 16
WANTED_PROGRAMS, LEAST_PART = 256, 512
"""K is taken apart until a product has about so many tiles of 64 outputs, into parts no shorter than that."""


def tile_of(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def step_of(matrix: Matrix) -> int:
    """Columns of one step over K: of one group."""
    return gcd(matrix.group, 64) if 0 < matrix.group < matrix.columns else 64


@dataclass(frozen=True)
class Parts:
    """How K is walked: columns of a step, of a part, and how many parts."""

    step: int
    length: int
    count: int

    @classmethod
    def of(cls, matrix: Matrix) -> Parts:
        step = step_of(matrix)
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
        row_kernels.scatter[(len(x), -(-columns // tile))](x, slots, pool, columns, pool.stride(0), TILE=tile)
