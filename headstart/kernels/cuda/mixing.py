"""Products of rows with many matrices of one form: experts that rows choose, and the heads of an attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from headstart.errors import ModelError
from headstart.kernels.cuda.kernels import experts as kernels, rows as row_kernels
from headstart.kernels.cuda.launch import ROWS, Launcher, step_of, tile_of
from headstart.kernels.cuda.matrix import Matrix
from headstart.kernels.cuda.plan import DevicePlan
from headstart.kernels.ops import Experts, RouterSpec

Told = tuple[Tensor, Tensor]
"""The experts of each token [V * top_k], and the rows' tokens."""
_NAMES = ("codes", "scales", "offsets")


@dataclass(frozen=True, eq=False)
class Dealt:
    """Pairs [tiles, ROWS] of rows and places, by the matrix they meet: `owners` [tiles]; -1: nothing."""

    pairs: Tensor
    owners: Tensor


def uniform(matrices: Sequence[Matrix]) -> None:
    """Raises ModelError for matrices that one kernel cannot walk."""
    forms = {
        (m.kind, m.rows, m.columns, m.group, m.zero, m.wide, m.codes.dtype, m.scales is None, m.offsets is None)
        for m in matrices
    }
    if len(forms) > 1:
        raise ModelError("the cuda backend has no kernel for experts of several weight types", "use --backend native")


class Mixer:
    """Remembers where matrices lie: of a tuple of them the first one is known by."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self._places: WeakKeyDictionary[Matrix, Tensor] = WeakKeyDictionary()
        self._biases: WeakKeyDictionary[Matrix, Tensor] = WeakKeyDictionary()
        self._heads: dict[tuple[int, int], Dealt] = {}

    def mixture(
        self,
        x: Tensor,
        logits: Tensor,
        bias: Tensor | None,
        experts: Experts,
        spec: RouterSpec,
        plan: DevicePlan,
        told: Told | None,
    ) -> Tensor:
        """Ops.moe."""
        ids, weights = self._routed(logits, bias, spec, plan, told)
        dealt, places = self._deal(ids, spec.num_matrices), spec.top_k
        rows = x
        if spec.scales_inputs:
            rows, places = (x[:, None] * weights[..., None]).flatten(0, 1), 1
        inner = self.product(rows, experts.up, dealt, ids.numel(), places, experts.up_bias)
        if experts.gate:
            gate = self.product(rows, experts.gate, dealt, ids.numel(), places, experts.gate_bias)
            made = torch.empty_like(inner)
            about = {"KIND": experts.activation}
            self._launch.each(row_kernels.activate_mul, inner.numel(), gate, inner, made, inner.numel(), **about)
        else:
            made = torch.empty_like(inner)
            about = {"KIND": experts.activation}
            self._launch.each(row_kernels.activate, inner.numel(), inner, made, inner.numel(), **about)
        said = self.product(made, experts.down, dealt, ids.numel(), 1, experts.down_bias)
        width = said.shape[1]
        out, tile = self._launch.empty(len(x), width), min(tile_of(width), self._launch.device.elements)
        kernels.combine[(len(x), -(-width // tile))](
            said, x, ids, weights, out, width, spec.num_matrices, TOP=spec.top_k, WEIGHS=not spec.scales_inputs,
            IDENTITY=spec.num_identity > 0, TILE=tile,
        )  # fmt: skip
        return out

    def _routed(
        self, logits: Tensor, bias: Tensor | None, spec: RouterSpec, plan: DevicePlan, told: Told | None
    ) -> tuple[Tensor, Tensor]:
        """(ids, weights) [R, top_k]."""
        place, shape = logits.device, (len(logits), spec.top_k)
        ids, weights = torch.empty(shape, dtype=torch.int32, device=place), torch.zeros(shape, device=place)
        table, tokens = told or (None, None)
        kernels.route[(len(logits),)](
            logits, bias, table, tokens, plan["sees"], ids, weights, spec.scale, NUM=spec.num_experts,
            TILE=tile_of(spec.num_experts), TOP=spec.top_k, TOP_TILE=tile_of(spec.top_k), SCORING=spec.scoring,
            NORMALIZE=spec.normalize, GROUPS=spec.num_groups, GROUP_TILE=tile_of(spec.num_groups),
            TOP_GROUPS=spec.top_groups, BIAS=bias is not None, TOLD=told is not None,
        )  # fmt: skip
        return ids, weights

    def _deal(self, ids: Tensor, num: int) -> Dealt:
        size, place = ids.numel(), ids.device
        tiles = min(size, size // ROWS + num)
        pairs, owners = (torch.full((n,), -1, dtype=torch.int32, device=place) for n in (tiles * ROWS, tiles))
        counts, tile = torch.empty(num, dtype=torch.int32, device=place), min(tile_of(size), 1024)
        kernels.count[(num,)](ids, counts, size, TILE=tile)
        kernels.deal[(num,)](ids, counts, pairs, owners, size, num, TILE=tile, EXPERT_TILE=tile_of(num))
        return Dealt(pairs, owners)

    def product(
        self, x: Tensor, matrices: Sequence[Matrix], dealt: Dealt, size: int, per_row: int,
        biases: Sequence[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        """[size, N]: of each pair its row of x [size / per_row, K] times its matrix [N, K]; 0 of pairs without one."""
        launch, matrix = self._launch, matrices[0]
        if matrix not in self._places:
            self._places[matrix] = _places(matrices)
            if biases:
                self._biases[matrix] = torch.stack(list(biases))
        narrow = launch.narrow and not matrix.wide
        sums = None if matrix.offsets is None else launch.group_sums(x, matrix, narrow=narrow)
        out = torch.zeros((size, matrix.rows), device=x.device)
        columns = max(min(tile_of(matrix.rows), launch.device.columns), 16)
        kernels.product[(-(-matrix.rows // columns), len(dealt.owners))](
            x, matrix.codes, matrix.scales, matrix.offsets, self._places[matrix], sums, matrix.levels,
            self._biases.get(matrix), dealt.pairs, dealt.owners, out, matrix.rows, matrix.columns, matrix.units,
            per_row, KIND=matrix.kind, ZERO=matrix.zero, GROUP=matrix.group, OFFSETS=matrix.offsets is not None,
            BIAS=matrix in self._biases, ROUND=narrow, WIDE=launch.device.wide or not narrow, COLUMNS=columns,
            STEP=step_of(matrix),
        )  # fmt: skip
        return out

    def by_heads(self, x: Tensor, matrices: Sequence[Matrix]) -> Tensor:
        """Ops.head_linear."""
        rows, heads = len(x), len(matrices)
        if (rows, heads) not in self._heads:
            self._heads[rows, heads] = _by_heads(rows, heads, x.device)
        apart = x.reshape(rows * heads, -1)
        return self.product(apart, matrices, self._heads[rows, heads], rows * heads, 1).view(rows, -1)


def _places(matrices: Sequence[Matrix]) -> Tensor:
    """[E, 3]: how many elements behind those of the first matrix its codes, scales and offsets lie."""
    uniform(matrices)
    found = np.zeros((len(matrices), len(_NAMES)), np.int64)
    for i, matrix in enumerate(matrices):
        for j, name in enumerate(_NAMES):
            own, first = getattr(matrix, name), getattr(matrices[0], name)
            if own is not None:
                found[i, j], rest = divmod(own.data_ptr() - first.data_ptr(), own.element_size())
                assert not rest, "a matrix that is not aligned"
    return torch.from_numpy(found).to(matrices[0].codes.device)


def _by_heads(rows: int, heads: int, place: torch.device) -> Dealt:
    tiles = -(-rows // ROWS)
    row = np.arange(tiles * ROWS)
    pairs = np.where(row < rows, row * heads, -1)[None] + np.where(row < rows, np.arange(heads)[:, None], 0)
    owners = np.repeat(np.arange(heads), tiles)
    made = (torch.from_numpy(np.ascontiguousarray(each.reshape(-1), np.int32)).to(place) for each in (pairs, owners))
    return Dealt(*made)
