"""A StepPlan on the device, filled up to a bucket of rows, so that one recording of a program serves many plans.

Rows that fill up have slot -1, store nothing and see nothing. Shapes: R rows of the bucket, S sequences, B blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core import StateSteps, StepPlan
from headstart.kernels.cuda.arrival import sent

Ints = NDArray[np.int32]
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rows that passes have; beyond the last, multiples of it."""
FEWEST_BLOCKS = 64
ALIGNED = 4
"""Integers of 16 bytes."""


def bucket_of(count: int) -> int:
    """The smallest bucket that holds so many."""
    largest = BUCKETS[-1]
    return next((size for size in BUCKETS if size >= count), -(-count // largest) * largest)


@dataclass(frozen=True)
class Shape:
    """What a recording of a program is made for: rows, rows with logits, blocks of a table, path slots, block size,
    first position, and states that are written."""

    rows: int
    logits: int
    blocks: int
    paths: int
    block_size: int
    first_position: int
    stores: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> Shape:
        blocks = max(FEWEST_BLOCKS, 1 << (max(plan.block_tables.shape[1], 1) - 1).bit_length())
        paths = bucket_of(len(plan.paths.slots)) if plan.paths else 0
        stores = bucket_of(len(plan.states.store_slots)) if plan.states and len(plan.states.store_slots) else 0
        rows, logits = bucket_of(plan.num_rows), bucket_of(len(plan.logit_rows)) if len(plan.logit_rows) else 0
        return cls(rows, logits, blocks, paths, plan.block_size, plan.first_position, stores)

    @property
    def context(self) -> int:
        """Positions of a table."""
        return self.blocks * self.block_size


def arrays_of(plan: StepPlan, shape: Shape) -> dict[str, Ints]:
    """The integers that kernels read, all of the sizes that `shape` says."""
    rows = shape.rows
    sequences = np.repeat(np.arange(len(plan.block_tables), dtype=np.int32), np.diff(plan.row_starts))
    tables = np.zeros((rows, shape.blocks), np.int32)
    tables[: len(plan.block_tables), : plan.block_tables.shape[1]] = plan.block_tables
    made = {
        "token_ids": _filled(plan.token_ids, rows),
        "positions": _filled(plan.positions, rows),
        "slots": _filled(plan.slots, rows, -1),
        "sees": _filled(plan.positions if plan.sees is None else plan.sees, rows, -1),
        "sequences": _filled(sequences, rows),
        "logit_rows": _filled(plan.logit_rows, shape.logits),
        "tables": tables,
        "path_starts": np.zeros(rows + 1, np.int32),
        "path_slots": np.zeros(max(shape.paths, 1), np.int32),
    }
    if plan.hidden_slots is not None:
        made["hidden_slots"] = _filled(plan.hidden_slots, rows)
    if plan.paths:
        made["path_starts"] = _continued(plan.paths.starts, rows + 1)
        made["path_slots"] = _filled(plan.paths.slots, shape.paths)
    return made if plan.states is None else made | state_arrays(plan, plan.states, sequences, shape)


def state_arrays(plan: StepPlan, told: StateSteps, sequences: Ints, shape: Shape) -> dict[str, Ints]:
    """Of recurrent layers: StateSteps by sequence, stores by number, and where rows are kept (owner -1: nowhere)."""
    rows, places = shape.rows, plan.positions - told.keeps[sequences]
    made = {
        "row_starts": _continued(plan.row_starts, rows + 1),
        "own": _filled(told.own, rows),
        "reads": _filled(told.reads, rows, -1),
        "starts": _filled(told.starts, rows),
        "store_starts": _continued(told.store_starts, rows + 1),
        "keep_owns": _filled(np.where(places >= 0, told.own[sequences], -1).astype(np.int32), rows, -1),
        "keep_places": _filled(np.maximum(places, 0).astype(np.int32), rows),
    }
    if shape.stores:
        of = np.repeat(np.arange(len(told.own), dtype=np.int32), np.diff(told.store_starts))
        made["store_sequences"] = _filled(of, shape.stores)
        made["store_positions"] = _filled(told.store_positions, shape.stores, int(told.starts[0]))
        made["store_slots"] = _filled(told.store_slots, shape.stores, -1)
    return made


def _continued(values: Ints, size: int) -> Ints:
    """The last one again and again."""
    return np.pad(values, (0, size - len(values)), mode="edge").astype(np.int32)


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


NOTHING = {"slots": -1, "sees": -1, "store_slots": -1, "keep_owns": -1}
"""What rows and stores that do nothing are told; all else is 0."""


@dataclass(eq=False)
class DevicePlan:
    """Integers of one shape on the device, in one buffer; `update` puts another plan of that shape into the same
    places."""

    shape: Shape
    device: torch.device
    plan: StepPlan
    ints: dict[str, Tensor] = field(default_factory=dict)
    _tiles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arrays = arrays_of(self.plan, self.shape)
        self._whole = self._made(_joined(arrays))
        parts = self._whole.split([_room(array) for array in arrays.values()])
        places = zip(arrays.items(), parts, strict=True)
        self.ints = {name: part[: array.size].view(array.shape) for (name, array), part in places}

    def update(self, plan: StepPlan) -> None:
        self.plan = plan
        self._whole.copy_(torch.from_numpy(_joined(arrays_of(plan, self.shape))), non_blocking=True)
        for size, kept in self._tiles.items():
            for place, array in zip(kept, tiles_of(plan, self.shape, size), strict=True):
                place.copy_(torch.from_numpy(array), non_blocking=True)

    def clear(self) -> None:
        """A plan of no rows."""
        self._whole.zero_()
        for name, filling in NOTHING.items():
            if name in self.ints:
                self.ints[name].fill_(filling)
        for _, counts in self._tiles.values():
            counts.zero_()

    def tiles(self, rows_per_tile: int) -> tuple[Tensor, Tensor]:
        """Of attention, for so many rows each at most; kept up to date from then on."""
        if rows_per_tile not in self._tiles:
            first, count = tiles_of(self.plan, self.shape, rows_per_tile)
            self._tiles[rows_per_tile] = self._made(first), self._made(count)
        return self._tiles[rows_per_tile]

    def _made(self, array: Ints) -> Tensor:
        return sent(array, self.device)

    def __getitem__(self, name: str) -> Tensor:
        return self.ints[name]


def _joined(arrays: Mapping[str, Ints]) -> Ints:
    whole = np.zeros(sum(_room(array) for array in arrays.values()), np.int32)
    at = 0
    for array in arrays.values():
        whole[at : at + array.size] = array.reshape(-1)
        at += _room(array)
    return whole


def _room(array: Ints) -> int:
    """Kernels are compiled for addresses that are multiples of 16 bytes, or for any: no plan may choose."""
    return -(-array.size // ALIGNED) * ALIGNED
