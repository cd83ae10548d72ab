"""Which slots rows read: spans of like size, padded into groups. R rows, S sequences of a group, Q rows of the longest
span, L cached positions."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core import Paths, StepPlan
from headstart.kernels.ops import KVSpec


@dataclass(frozen=True, eq=False)
class Group:
    """Spans of like size, padded: `rows` [S, Q] into the pass, `valid` [S, Q], `slots` [S, L], `mask` [S, Q, L]
    (0 where the row may look, -inf elsewhere). Where rows have paths each is a span of its own."""

    rows: Tensor
    valid: Tensor
    slots: Tensor
    mask: Tensor

    def only(self, seen: Tensor) -> Group:
        """The same, where rows look at the positions in `seen` [S, Q, L]."""
        return replace(self, mask=torch.zeros_like(self.mask).masked_fill_(~seen, float("-inf")))


@dataclass(frozen=True, eq=False)
class Spans:
    """Rows that read the same slots: those of one sequence, or a row alone where rows have paths of their own."""

    plan: StepPlan
    row_starts: NDArray[np.int64]  # [S + 1]
    tables: NDArray[np.int32]  # [S, B]
    sees: NDArray[np.int32]  # [R]
    ends: NDArray[np.int32]  # [S] the last position that any of its rows sees + 1

    @classmethod
    def of(cls, plan: StepPlan) -> Spans:
        sees = plan.positions if plan.sees is None else plan.sees
        if plan.paths is None:
            ends = np.maximum.reduceat(sees, plan.row_starts[:-1]) + 1
            return cls(plan, plan.row_starts.astype(np.int64), plan.block_tables, sees, ends)
        tables = np.repeat(plan.block_tables, np.diff(plan.row_starts), axis=0)
        return cls(plan, np.arange(plan.num_rows + 1), tables, sees, sees + 1)

    def group(self, spans: NDArray[np.int64], spec: KVSpec, device: torch.device, dtype: torch.dtype) -> Group:
        plan, starts = self.plan, self.row_starts[spans]
        lengths = self.row_starts[spans + 1] - starts
        columns = np.arange(lengths.max())
        valid = columns[None, :] < lengths[:, None]
        rows = np.where(valid, starts[:, None] + columns, starts[:, None])
        positions = np.arange(plan.first_position, self.ends[spans].max())
        # padding reads the span's own last position: a slot of somebody else may hold NaN, which no weight of 0 removes
        reads = np.minimum(positions, self.ends[spans][:, None] - 1)
        blocks = np.take_along_axis(self.tables[spans], reads // plan.block_size, axis=1)
        slots = blocks * plan.block_size + reads % plan.block_size
        if plan.paths:
            self._walk(plan.paths, spans, slots)
        last = plan.positions - spec.before if spec.causal or spec.before else self.sees
        visible = positions[None, None, :] <= last[rows][:, :, None]
        if spec.window:
            visible &= positions[None, None, :] > plan.positions[rows][:, :, None] - spec.window
        if spec.chunk:
            visible &= positions[None, None, :] >= (plan.positions[rows] // spec.chunk * spec.chunk)[:, :, None]
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~torch.from_numpy(visible), float("-inf"))
        rows_t, valid_t, slots_t = (torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in (rows, valid, slots))
        return Group(rows_t, valid_t, slots_t, mask.to(device))

    def _walk(self, paths: Paths, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Put the paths of rows into their slots [S, L]; padding repeats the row's own."""
        for span, row in enumerate(rows):
            path = paths.slots[paths.starts[row] : paths.starts[row + 1]]
            if len(path):
                end = self.plan.positions[row] + 1 - self.plan.first_position
                slots[span, end - len(path) : end] = path
                slots[span, end:] = path[-1]
