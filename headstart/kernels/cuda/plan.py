"""A StepPlan on the device, filled up to a bucket of rows, so that one recording of a program serves many plans.

Rows that fill up have slot -1, store nothing and see nothing. Shapes: R rows of the bucket, S sequences, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core import StepPlan

Ints = NDArray[np.int32]
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rows that passes have; beyond the last, multiples of it."""
FEWEST_BLOCKS = 64


def bucket_of(count: int) -> int:
    """The smallest bucket that holds so many."""
    largest = BUCKETS[-1]
    return next((size for size in BUCKETS if size >= count), -(-count // largest) * largest)


@dataclass(frozen=True)
class Shape:
    """What a recording of a program is made for: rows, rows with logits, blocks of a table, path slots, block size and
    first position."""

    rows: int
    logits: int
    blocks: int
    paths: int
    block_size: int
    first_position: int

    @classmethod
    def of(cls, plan: StepPlan) -> Shape:
        blocks = max(FEWEST_BLOCKS, 1 << (max(plan.block_tables.shape[1], 1) - 1).bit_length())
        paths = bucket_of(len(plan.paths.slots)) if plan.paths else 0
        return cls(bucket_of(plan.num_rows), len(plan.logit_rows), blocks, paths, plan.block_size, plan.first_position)

    @property
    def context(self) -> int:
        """Positions of a table."""
        return self.blocks * self.block_size


def arrays_of(plan: StepPlan, shape: Shape) -> dict[str, Ints]:
    """The integers that kernels read, all of the sizes that `shape` says."""
    rows, count = shape.rows, plan.num_rows
    sequences = np.repeat(np.arange(len(plan.block_tables), dtype=np.int32), np.diff(plan.row_starts))
    tables = np.zeros((rows, shape.blocks), np.int32)
    tables[: len(plan.block_tables), : plan.block_tables.shape[1]] = plan.block_tables
    made = {
        "token_ids": _filled(plan.token_ids, rows),
        "positions": _filled(plan.positions, rows),
        "slots": _filled(plan.slots, rows, -1),
        "sees": _filled(plan.positions if plan.sees is None else plan.sees, rows, -1),
        "sequences": _filled(sequences, rows),
        "logit_rows": plan.logit_rows,
        "tables": tables,
        "path_starts": np.zeros(rows + 1, np.int32),
        "path_slots": np.zeros(max(shape.paths, 1), np.int32),
    }
    if plan.hidden_slots is not None:
        made["hidden_slots"] = _filled(plan.hidden_slots, rows)
    if plan.paths:
        made["path_starts"] = np.pad(plan.paths.starts, (0, rows - count), mode="edge").astype(np.int32)
        made["path_slots"] = _filled(plan.paths.slots, shape.paths)
    return made


def _filled(values: Ints, size: int, filling: int = 0) -> Ints:
    out = np.full(size, filling, np.int32)
    out[: len(values)] = values
    return out


def tiles_of(plan: StepPlan, shape: Shape, rows_per_tile: int) -> tuple[Ints, Ints]:
    """(first rows, counts) of tiles of rows of one sequence, [R]; of those that fill up 0. A row with a path is
    alone."""
    most = 1 if plan.paths else rows_per_tile
    starts: list[int] = []
    counts: list[int] = []
    bounds = plan.row_starts.tolist()
    for begin, end in pairwise(bounds):
        for first in range(begin, end, most):
            starts.append(first)
            counts.append(min(most, end - first))
    return _filled(np.array(starts, np.int32), shape.rows), _filled(np.array(counts, np.int32), shape.rows)


@dataclass(eq=False)
class DevicePlan:
    """Integers of one shape on the device; `update` puts another plan of that shape into the same places."""

    shape: Shape
    device: torch.device
    plan: StepPlan
    ints: dict[str, Tensor] = field(default_factory=dict)
    _tiles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ints = {name: self._made(array) for name, array in arrays_of(self.plan, self.shape).items()}

    def update(self, plan: StepPlan) -> None:
        self.plan = plan
        for name, array in arrays_of(plan, self.shape).items():
            self.ints[name].copy_(torch.from_numpy(array), non_blocking=True)
        for size, kept in self._tiles.items():
            for place, array in zip(kept, tiles_of(plan, self.shape, size), strict=True):
                place.copy_(torch.from_numpy(array), non_blocking=True)

    def tiles(self, rows_per_tile: int) -> tuple[Tensor, Tensor]:
        """Of attention, for so many rows each at most; kept up to date from then on."""
        if rows_per_tile not in self._tiles:
            first, count = tiles_of(self.plan, self.shape, rows_per_tile)
            self._tiles[rows_per_tile] = self._made(first), self._made(count)
        return self._tiles[rows_per_tile]

    def _made(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self.device)

    def __getitem__(self, name: str) -> Tensor:
        return self.ints[name]
