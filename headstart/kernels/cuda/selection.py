"""Launches the kernels of indexers. Shapes: R rows."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch
from torch import Tensor

from headstart.kernels.cuda.attention import BLOCK, CHOSEN, PositionList
from headstart.kernels.cuda.kernels import selection as kernels
from headstart.kernels.cuda.launch import KernelLauncher, tile_size
from headstart.kernels.cuda.plan import DevicePlan
from headstart.kernels.specs import IndexSpec
from headstart.kernels.torch_backend import TorchKVPool

INDEX, END, WHOLE = range(3)  # what is listed of a chosen window (see kernels/selection.py)


class Selector:
    """The selections of one pass."""

    def __init__(self, launch: KernelLauncher, plan: DevicePlan) -> None:
        self._launch, self._plan = launch, plan
        self._kept: Tensor | None = None  # int32 [R, blocks]: 1 for those that the last source of candidates keeps

    def select_positions(self, q: Tensor, weights: Tensor, pool: TorchKVPool, spec: IndexSpec) -> PositionList:
        """Ops.select_positions."""
        scores = self._launch.empty(len(q), spec.groups, self._num_windows(spec.every))
        grid = (len(q), -(-scores.shape[2] // BLOCK), spec.groups)
        self._score(kernels.score, grid, scores, pool, spec, q, weights, GROUPS=spec.groups)
        blocks, kept = spec.candidates, None
        if blocks and blocks.source:
            self._kept = self._best_blocks(scores[:, 0], blocks.count, blocks.size, spec.every)
        elif blocks:
            kept = self._kept
        return self._choose(
            scores, spec.top_k, spec.every, listed=WHOLE if spec.whole else END, missing=-1 if spec.local else 0,
            kept=kept, per_kept=blocks.size if blocks and kept is not None else 0,
        )  # fmt: skip

    def select_blocks(self, q: Tensor, pool: TorchKVPool, spec: IndexSpec) -> PositionList:
        """Ops.select_blocks."""
        scores = self._launch.empty(len(q), spec.num_heads, self._num_windows(spec.every))
        self._score(kernels.score_blocks, (len(q), scores.shape[2]), scores, pool, spec, q)
        return self._choose(scores, spec.top_k, spec.every, listed=WHOLE, missing=spec.every - 1, newest=True)

    def _num_windows(self, every: int) -> int:
        return -(-self._plan.shape.context // every)

    def _score(
        self, kernel: Any, grid: tuple[int, ...], scores: Tensor, pool: TorchKVPool, spec: IndexSpec, *asked: Tensor,
        **options: int,
    ) -> None:  # fmt: skip
        plan, shape, keys = self._plan, self._plan.shape, pool.keys
        wide = keys.dtype != torch.bfloat16 or not self._launch.narrow
        kernel[grid](
            *asked, keys, scores, plan["positions"], plan["visible_end"], plan["sequences"], plan["tables"],
            plan["path_starts"], plan["path_slots"], shape.first_position, shape.blocks, shape.block_size,
            scores.shape[2], HEADS=spec.num_heads, EVERY=spec.every, DIM=spec.head_dim, PATHS=shape.paths > 0,
            ROUND=not wide, WIDE=self._launch.device.wide or wide, BLOCK=BLOCK, STEP=max(gcd(spec.head_dim, 64), 16),
            **options,
        )  # fmt: skip

    def _best_blocks(self, scores: Tensor, count: int, size: int, every: int) -> Tensor:
        """The `count` best blocks of `size` windows, the newest always among them: int32 [R, blocks], 1 or 0."""
        lowest = torch.finfo(torch.float32).min
        known = torch.where(scores >= lowest, scores, lowest)  # NaN come last
        padded = torch.nn.functional.pad(known, (0, -known.shape[1] % size), value=lowest)
        greatest = padded.unflatten(1, (-1, size)).amax(2)
        best = self._choose(
            greatest[:, None], count, every * size, listed=INDEX, missing=every * (size - 1), newest=True
        )
        assert best.chosen is not None
        # a list that is not full has all blocks, so the zeros behind it mark none that is not kept
        return torch.zeros_like(greatest, dtype=torch.int32).scatter_(1, best.chosen[:, 0].long(), 1)

    def _choose(
        self, scores: Tensor, top: int, every: int, *, listed: int, missing: int, newest: bool = False,
        kept: Tensor | None = None, per_kept: int = 0,
    ) -> PositionList:  # fmt: skip
        plan, (rows, selections, num_windows) = self._plan, scores.shape
        width = min((top + 1) * every, plan.shape.context) if listed == WHOLE else min(top, num_windows)
        shapes = (rows, selections, width), (rows,)
        chosen, counts = (torch.zeros(shape, dtype=torch.int32, device=scores.device) for shape in shapes)
        kernels.choose[(rows, selections)](
            scores, chosen if kept is None else kept, chosen, counts, plan["positions"], plan["visible_end"],
            plan.shape.first_position, num_windows, 0 if kept is None else kept.shape[1], width, top, EVERY=every,
            MISSING=missing, NEWEST=newest, KEPT=per_kept, LISTED=listed, WINDOW_TILE=tile_size(every),
            TILE=min(tile_size(num_windows), self._launch.device.elements),
        )  # fmt: skip
        return PositionList(CHOSEN, width, chosen=chosen, counts=counts)
