"""A StepPlan on the device, padded to a bucket of rows, so that one recording of a program serves many plans.

Padding rows have slot -1, store nothing and see nothing. Shapes: R rows of the bucket, S sequences, B blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from headstart.core import Int32, StateSteps, StepPlan
from headstart.kernels.cuda.device import copy_to_device

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Row counts of padded passes; beyond the last, its multiples."""
MIN_BLOCKS = 64  # width of a block table, at least
ALIGNED_INTS = 4  # integers in 16 bytes


def bucket_of(count: int) -> int:
    """The smallest bucket >= count."""
    largest = BUCKETS[-1]
    return next((size for size in BUCKETS if size >= count), -(-count // largest) * largest)


@dataclass(frozen=True)
class PlanShape:
    """Padded sizes of a plan, for which a program is recorded."""

    rows: int
    logits: int  # rows with logits
    blocks: int  # of a block table
    paths: int  # path slots
    block_size: int
    first_position: int
    stores: int = 0  # recurrent states written
    num_axes: int = 0  # of rotary positions; 0: rows have their positions alone

    @classmethod
    def of(cls, plan: StepPlan) -> PlanShape:
        blocks = max(MIN_BLOCKS, 1 << (max(plan.block_tables.shape[1], 1) - 1).bit_length())
        paths = bucket_of(len(plan.paths.slots)) if plan.paths else 0
        stores = bucket_of(len(plan.states.store_slots)) if plan.states and len(plan.states.store_slots) else 0
        rows, logits = bucket_of(plan.num_rows), bucket_of(len(plan.logit_rows)) if len(plan.logit_rows) else 0
        num_axes = 0 if plan.rope_positions is None else plan.rope_positions.shape[1]
        return cls(rows, logits, blocks, paths, plan.block_size, plan.first_position, stores, num_axes)

    @property
    def context(self) -> int:
        """Positions covered by a block table."""
        return self.blocks * self.block_size


def plan_arrays(plan: StepPlan, shape: PlanShape) -> dict[str, Int32]:
    """The integer arrays that kernels read, padded to `shape`."""
    rows = shape.rows
    sequences = plan.sequences
    tables = np.zeros((rows, shape.blocks), np.int32)
    tables[: len(plan.block_tables), : plan.block_tables.shape[1]] = plan.block_tables
    arrays = {
        "token_ids": _padded(plan.token_ids, rows),
        "positions": _padded(plan.positions, rows),
        "block_starts": _padded(plan.block_starts, rows),
        "slots": _padded(plan.slots, rows, -1),
        "visible_end": _padded(plan.positions if plan.visible_end is None else plan.visible_end, rows, -1),
        "sequences": _padded(sequences, rows),
        "logit_rows": _padded(plan.logit_rows, shape.logits),
        "tables": tables,
        "path_starts": np.zeros(rows + 1, np.int32),
        "path_slots": np.zeros(max(shape.paths, 1), np.int32),
    }
    if plan.hidden_slots is not None:
        arrays["hidden_slots"] = _padded(plan.hidden_slots, rows)
    if plan.rope_positions is not None:
        arrays["rope_positions"] = np.zeros((rows, shape.num_axes), np.int32)
        arrays["rope_positions"][: plan.num_rows] = plan.rope_positions
    if plan.paths:
        arrays["path_starts"] = _padded_with_last(plan.paths.starts, rows + 1)
        arrays["path_slots"] = _padded(plan.paths.slots, shape.paths)
    return arrays if plan.states is None else arrays | state_arrays(plan, plan.states, sequences, shape)


def state_arrays(plan: StepPlan, steps: StateSteps, sequences: Int32, shape: PlanShape) -> dict[str, Int32]:
    """StateSteps for kernels: arrays per sequence, per store, and where each row is kept (owner -1: not kept)."""
    rows, places = shape.rows, plan.positions - steps.keeps[sequences]
    arrays = {
        "row_starts": _padded_with_last(plan.row_starts, rows + 1),
        "own": _padded(steps.own, rows),
        "reads": _padded(steps.reads, rows, -1),
        "starts": _padded(steps.starts, rows),
        "store_starts": _padded_with_last(steps.store_starts, rows + 1),
        "keep_owns": _padded(np.where(places >= 0, steps.own[sequences], -1).astype(np.int32), rows, -1),
        "keep_places": _padded(np.maximum(places, 0).astype(np.int32), rows),
    }
    if shape.stores:
        of = np.repeat(np.arange(len(steps.own), dtype=np.int32), np.diff(steps.store_starts))
        arrays["store_sequences"] = _padded(of, shape.stores)
        arrays["store_positions"] = _padded(steps.store_positions, shape.stores, int(steps.starts[0]))
        arrays["store_slots"] = _padded(steps.store_slots, shape.stores, -1)
    return arrays


def _padded_with_last(values: Int32, size: int) -> Int32:
    """Pad with the last value."""
    return np.pad(values, (0, size - len(values)), mode="edge").astype(np.int32)


def _padded(values: Int32, size: int, fill: int = 0) -> Int32:
    out = np.full(size, fill, np.int32)
    out[: len(values)] = values
    return out


def row_tiles(plan: StepPlan, shape: PlanShape, rows_per_tile: int) -> tuple[Int32, Int32]:
    """(first rows [R], row counts [R]) of attention tiles, each within one sequence; unused tiles have 0 rows. Rows
    with paths get a tile each."""
    max_rows = 1 if plan.paths else rows_per_tile
    starts: list[int] = []
    counts: list[int] = []
    bounds = plan.row_starts.tolist()
    for begin, end in pairwise(bounds):
        for first in range(begin, end, max_rows):
            starts.append(first)
            counts.append(min(max_rows, end - first))
    return _padded(np.array(starts, np.int32), shape.rows), _padded(np.array(counts, np.int32), shape.rows)


INACTIVE = {"slots": -1, "visible_end": -1, "store_slots": -1, "keep_owns": -1}
"""Values of rows and stores that do nothing; all other arrays are 0."""


@dataclass(eq=False)
class DevicePlan:
    """The arrays of a plan in one device buffer; `update` copies another plan of the same shape into it."""

    shape: PlanShape
    device: torch.device
    plan: StepPlan
    ints: dict[str, Tensor] = field(default_factory=dict)
    _tiles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arrays = plan_arrays(self.plan, self.shape)
        self._whole = copy_to_device(_join(arrays), self.device)
        parts = self._whole.split([_aligned_size(array) for array in arrays.values()])
        named = zip(arrays.items(), parts, strict=True)
        self.ints = {name: part[: array.size].view(array.shape) for (name, array), part in named}

    def update(self, plan: StepPlan) -> None:
        self.plan = plan
        self._whole.copy_(torch.from_numpy(_join(plan_arrays(plan, self.shape))), non_blocking=True)
        for size, tiles in self._tiles.items():
            for buffer, array in zip(tiles, row_tiles(plan, self.shape, size), strict=True):
                buffer.copy_(torch.from_numpy(array), non_blocking=True)

    def clear(self) -> None:
        """Make all rows and stores inactive."""
        self._whole.zero_()
        for name, value in INACTIVE.items():
            if name in self.ints:
                self.ints[name].fill_(value)
        for _, counts in self._tiles.values():
            counts.zero_()

    def tiles(self, rows_per_tile: int) -> tuple[Tensor, Tensor]:
        """Attention tiles of at most that many rows (see row_tiles); later updates keep them current."""
        if rows_per_tile not in self._tiles:
            first, count = row_tiles(self.plan, self.shape, rows_per_tile)
            self._tiles[rows_per_tile] = copy_to_device(first, self.device), copy_to_device(count, self.device)
        return self._tiles[rows_per_tile]

    def __getitem__(self, name: str) -> Tensor:
        return self.ints[name]


def _join(arrays: Mapping[str, Int32]) -> Int32:
    whole = np.zeros(sum(_aligned_size(array) for array in arrays.values()), np.int32)
    at = 0
    for array in arrays.values():
        whole[at : at + array.size] = array.reshape(-1)
        at += _aligned_size(array)
    return whole


def _aligned_size(array: Int32) -> int:
    """Size rounded up to 16 bytes: kernels are specialized on alignment, which must not depend on the plan."""
    return -(-array.size // ALIGNED_INTS) * ALIGNED_INTS
