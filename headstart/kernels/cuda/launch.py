"""Launches kernels with their grids, tiles and buffers.

Whatever decides an order of sums depends on the matrix's shape only. Shapes: R rows, N outputs, K inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor

from headstart.kernels.cuda.device import CudaDevice
from headstart.kernels.cuda.kernels import products, rows as row_kernels
from headstart.kernels.cuda.matrix import CudaMatrix

TILE_ROWS = 16
WANTED_PROGRAMS, MIN_PART = 256, 512
"""K is split until a product has about that many programs of 64 outputs, into parts of at least MIN_PART."""


def tile_size(size: int) -> int:
    """The smallest power of two >= size."""
    return 1 << max(size - 1, 0).bit_length()


def step_of(matrix: CudaMatrix) -> int:
    """Columns of one step over K, within one scale group."""
    return gcd(matrix.group, 64) if 0 < matrix.group < matrix.columns else 64


@dataclass(frozen=True)
class KSplits:
    """How a product splits K."""

    step: int  # columns of a step
    length: int  # columns of a part
    count: int  # parts

    @classmethod
    def of(cls, matrix: CudaMatrix) -> KSplits:
        step = step_of(matrix)
        wanted = min(WANTED_PROGRAMS // max(-(-matrix.rows // 64), 1), matrix.columns // MIN_PART)
        unit = max(step, matrix.group if matrix.group < matrix.columns else step)
        length = -(-matrix.columns // max(wanted, 1) // unit) * unit
        return cls(step, length, -(-matrix.columns // length))


class KernelLauncher:
    """Launches kernels on one device.

    narrow: products round rows to bfloat16 for tensor cores, where the matrix's codes fit bfloat16; else float32."""

    def __init__(self, device: CudaDevice, *, narrow: bool) -> None:
        self.device, self.narrow = device, narrow

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=self.device.torch_device)

    def product(self, x: Tensor, matrix: CudaMatrix, bias: Tensor | None = None, sums: Tensor | None = None) -> Tensor:
        """x [R, K] @ matrix [N, K]^T + bias [N] -> [R, N]. sums [R, U]: sums of x by the matrix's groups, if known."""
        count, parts = len(x), KSplits.of(matrix)
        narrow = self.narrow and not matrix.wide
        if matrix.offsets is not None and sums is None:
            sums = self.group_sums(x, matrix, narrow=narrow)
        out = self.empty(parts.count, count, matrix.rows) if parts.count > 1 else self.empty(count, matrix.rows)
        columns = min(tile_size(matrix.rows), self.device.columns)
        grid = (-(-matrix.rows // columns), -(-count // TILE_ROWS), parts.count)
        products.product[grid](
            x, matrix.codes, matrix.scales, matrix.offsets, sums, matrix.levels, bias if parts.count == 1 else None,
            out, count, matrix.rows, matrix.columns, matrix.units, parts.length,
            KIND=matrix.kind, ZERO=matrix.zero, GROUP=matrix.group, OFFSETS=matrix.offsets is not None,
            BIAS=bias is not None and parts.count == 1, ROUND=narrow, WIDE=self.device.wide or not narrow,
            COLUMNS=max(columns, 16), STEP=parts.step,
        )  # fmt: skip
        return self._join_parts(out, bias) if parts.count > 1 else out

    def _join_parts(self, parts: Tensor, bias: Tensor | None) -> Tensor:
        count, rows, columns = parts.shape
        out = self.empty(rows, columns)
        size = out.numel()
        self.each(products.join_parts, size, parts, bias, out, size, columns, count, BIAS=bias is not None)
        return out

    def group_sums(self, x: Tensor, matrix: CudaMatrix, *, narrow: bool) -> Tensor:
        """Sums of x [R, K] by the matrix's groups -> [R, U]."""
        sums, units = self.empty(len(x), matrix.units), min(tile_size(matrix.units), 64)
        products.group_sums[(len(x), -(-matrix.units // units))](
            x, sums, matrix.columns, matrix.units, GROUP=matrix.group, WIDTH=tile_size(matrix.group), UNITS=units,
            ROUND=narrow,
        )  # fmt: skip
        return sums

    def take(self, matrix: CudaMatrix, ids: Tensor) -> Tensor:
        """Rows ids [R] of a matrix -> [R, K]."""
        out, width = self.empty(len(ids), matrix.columns), min(tile_size(matrix.columns), 4096)
        products.take[(len(ids), -(-matrix.columns // width))](
            matrix.codes, matrix.scales, matrix.offsets, matrix.levels, ids, out, matrix.columns, matrix.units,
            KIND=matrix.kind, ZERO=matrix.zero, GROUP=matrix.group, OFFSETS=matrix.offsets is not None, WIDTH=width,
        )  # fmt: skip
        return out

    def norm(
        self, x: Tensor, weight: Tensor, eps: float, num_parts: int, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(RMS norm of x + residual, x + residual) of x [R, W]."""
        columns = x.shape[1]
        width = weight.numel() // num_parts
        out, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
        row_kernels.norm[(len(x),)](
            x, residual, weight, out, total, columns, eps, num_parts, WIDTH=width, GROUPS=columns // width,
            GROUP_TILE=tile_size(columns // width), TILE=tile_size(width), RESIDUAL=residual is not None,
        )  # fmt: skip
        return out, total

    def each(self, kernel: Any, size: int, *arguments: Any, **options: Any) -> None:
        """Run an elementwise kernel over `size` elements."""
        count = self.device.elements
        kernel[(-(-size // count),)](*arguments, COUNT=count, **options)

    def scatter(self, x: Tensor, slots: Tensor, pool: Tensor) -> None:
        """Write rows of x [R, W] to slots [R] of pool [slots, W]."""
        columns = x.shape[1]
        tile = min(tile_size(columns), 4096)
        row_kernels.scatter[(len(x), -(-columns // tile))](x, slots, pool, columns, pool.stride(0), TILE=tile)
