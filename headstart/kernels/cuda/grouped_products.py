"""Products of rows with one of many matrices of the same layout: mixture-of-experts layers and per-head matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from headstart.errors import ModelError
from headstart.kernels.cuda.kernels import experts as kernels, rows as row_kernels
from headstart.kernels.cuda.launch import TILE_ROWS, KernelLauncher, step_of, tile_size
from headstart.kernels.cuda.matrix import CudaMatrix
from headstart.kernels.cuda.plan import DevicePlan
from headstart.kernels.ops import Experts, RouterSpec
from headstart.kernels.reference.moe import ByToken
from headstart.wording import option

_ARRAYS = ("codes", "scales", "offsets")


@dataclass(frozen=True, eq=False)
class ExpertTiles:
    """(row, place) pairs sorted by matrix into tiles of TILE_ROWS."""

    pairs: Tensor  # int32 [tiles * TILE_ROWS]: index of the pair; -1: unused
    owners: Tensor  # int32 [tiles]: index of the matrix; -1: unused


def check_same_layout(matrices: Sequence[CudaMatrix]) -> None:
    """Raise ModelError for matrices of different layouts, which one kernel cannot multiply."""
    layouts = {
        (m.kind, m.rows, m.columns, m.group, m.zero, m.wide, m.codes.dtype, m.scales is None, m.offsets is None)
        for m in matrices
    }
    if len(layouts) > 1:
        raise ModelError(
            "the cuda backend has no kernel for experts of several weight types", "use " + option("backend", "native")
        )


class GroupedProducts:
    """Launches grouped products. Tables of matrix addresses are cached by the first matrix of a tuple."""

    def __init__(self, launch: KernelLauncher) -> None:
        self._launch = launch
        self._offsets: WeakKeyDictionary[CudaMatrix, Tensor] = WeakKeyDictionary()
        self._biases: WeakKeyDictionary[CudaMatrix, Tensor] = WeakKeyDictionary()
        self._head_tiles: dict[tuple[int, int], ExpertTiles] = {}

    def moe(
        self, x: Tensor, logits: Tensor, bias: Tensor | None, experts: Experts, spec: RouterSpec, plan: DevicePlan,
        token_experts: ByToken | None,
    ) -> Tensor:  # fmt: skip
        """Ops.moe."""
        launch, kind = self._launch, experts.activation
        ids, weights = self._route(logits, bias, spec, plan, token_experts)
        tiles, size = self._sort_by_expert(ids, spec.num_matrices), ids.numel()
        rows, per_row = x, spec.top_k
        if spec.scales_inputs:
            rows, per_row = (x[:, None] * weights[..., None]).flatten(0, 1), 1
        inner = self.product(rows, experts.up, tiles, size, per_row, experts.up_bias)
        activated, count = torch.empty_like(inner), inner.numel()
        if experts.gate:
            gate = self.product(rows, experts.gate, tiles, size, per_row, experts.gate_bias)
            launch.each(row_kernels.activate_mul, count, gate, inner, activated, count, KIND=kind)
        else:
            launch.each(row_kernels.activate, count, inner, activated, count, KIND=kind)
        outputs = self.product(activated, experts.down, tiles, size, 1, experts.down_bias)
        width = outputs.shape[1]
        out, tile = launch.empty(len(x), width), min(tile_size(width), launch.device.elements)
        kernels.combine[(len(x), -(-width // tile))](
            outputs, x, ids, weights, out, width, spec.num_matrices, TOP=spec.top_k, WEIGHTED=not spec.scales_inputs,
            IDENTITY=spec.num_identity > 0, TILE=tile,
        )  # fmt: skip
        return out

    def _route(
        self, logits: Tensor, bias: Tensor | None, spec: RouterSpec, plan: DevicePlan,
        token_experts: ByToken | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(expert ids int32, weights float32), both [R, top_k] in ascending order of id."""
        device, shape = logits.device, (len(logits), spec.top_k)
        ids, weights = torch.empty(shape, dtype=torch.int32, device=device), torch.zeros(shape, device=device)
        table, tokens = token_experts or (None, None)
        kernels.route[(len(logits),)](
            logits, bias, table, tokens, plan["visible_end"], ids, weights, spec.scale, NUM=spec.num_experts,
            TILE=tile_size(spec.num_experts), TOP=spec.top_k, TOP_TILE=tile_size(spec.top_k), SCORING=spec.scoring,
            NORMALIZE=spec.normalize, GROUPS=spec.num_groups, GROUP_TILE=tile_size(spec.num_groups),
            TOP_GROUPS=spec.top_groups, BIAS=bias is not None, TOKEN_EXPERTS=token_experts is not None,
        )  # fmt: skip
        return ids, weights

    def _sort_by_expert(self, ids: Tensor, num: int) -> ExpertTiles:
        size, device = ids.numel(), ids.device
        tiles = min(size, size // TILE_ROWS + num)
        pairs, owners = (torch.full((n,), -1, dtype=torch.int32, device=device) for n in (tiles * TILE_ROWS, tiles))
        counts, tile = torch.empty(num, dtype=torch.int32, device=device), min(tile_size(size), 1024)
        kernels.count[(num,)](ids, counts, size, TILE=tile)
        kernels.sort_into_tiles[(num,)](ids, counts, pairs, owners, size, num, TILE=tile, EXPERT_TILE=tile_size(num))
        return ExpertTiles(pairs, owners)

    def product(
        self, x: Tensor, matrices: Sequence[CudaMatrix], tiles: ExpertTiles, size: int, per_row: int,
        biases: Sequence[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        """[size, N]: each pair's row of x [size / per_row, K] times its matrix [N, K], plus its bias; 0 for pairs
        without a matrix."""
        launch, matrix = self._launch, matrices[0]
        if matrix not in self._offsets:
            self._offsets[matrix] = _offsets(matrices)
            if biases:
                self._biases[matrix] = torch.stack(list(biases))
        narrow = launch.narrow and not matrix.wide
        sums = None if matrix.offsets is None else launch.group_sums(x, matrix, narrow=narrow)
        out = torch.zeros((size, matrix.rows), device=x.device)
        columns = max(min(tile_size(matrix.rows), launch.device.columns), 16)
        kernels.product[(-(-matrix.rows // columns), len(tiles.owners))](
            x, matrix.codes, matrix.scales, matrix.offsets, self._offsets[matrix], sums, matrix.levels,
            self._biases.get(matrix), tiles.pairs, tiles.owners, out, matrix.rows, matrix.columns, matrix.units,
            per_row, KIND=matrix.kind, ZERO=matrix.zero, GROUP=matrix.group, OFFSETS=matrix.offsets is not None,
            BIAS=matrix in self._biases, ROUND=narrow, WIDE=launch.device.wide or not narrow, COLUMNS=columns,
            STEP=step_of(matrix),
        )  # fmt: skip
        return out

    def head_linear(self, x: Tensor, matrices: Sequence[CudaMatrix]) -> Tensor:
        """Ops.head_linear."""
        rows, heads = len(x), len(matrices)
        if (rows, heads) not in self._head_tiles:
            self._head_tiles[rows, heads] = _head_tiles(rows, heads, x.device)
        by_head = x.reshape(rows * heads, -1)
        return self.product(by_head, matrices, self._head_tiles[rows, heads], rows * heads, 1).view(rows, -1)


def _offsets(matrices: Sequence[CudaMatrix]) -> Tensor:
    """int64 [E, 3]: distance in elements of each matrix's codes, scales and offsets from those of the first."""
    check_same_layout(matrices)
    distances = np.zeros((len(matrices), len(_ARRAYS)), np.int64)
    for i, matrix in enumerate(matrices):
        for j, name in enumerate(_ARRAYS):
            own, first = getattr(matrix, name), getattr(matrices[0], name)
            if own is not None:
                distances[i, j], rest = divmod(own.data_ptr() - first.data_ptr(), own.element_size())
                assert not rest, "a matrix that is not aligned"
    return torch.from_numpy(distances).to(matrices[0].codes.device)


def _head_tiles(rows: int, heads: int, device: torch.device) -> ExpertTiles:
    """Tiles of all (row, head) pairs, sorted by head."""
    tiles = -(-rows // TILE_ROWS)
    row = np.arange(tiles * TILE_ROWS)
    pairs = np.where(row < rows, row * heads, -1)[None] + np.where(row < rows, np.arange(heads)[:, None], 0)
    owners = np.repeat(np.arange(heads), tiles)
    arrays = (torch.from_numpy(np.ascontiguousarray(each.reshape(-1), np.int32)).to(device) for each in (pairs, owners))
    return ExpertTiles(*arrays)
