"""Plans, weights and runs for tests of the cuda kernels."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from headstart.core import StepPlan
from headstart.formats.base import Tensor, make_tensor
from headstart.kernels.ops import Ops, StepInputs
from headstart.kernels.reference.backend import ReferenceBackend

REFERENCE = ReferenceBackend()
Code = Callable[[Ops, StepInputs], dict[str, Any]]


def rng() -> np.random.Generator:
    return np.random.default_rng(7)


def plan_of(spans: list[tuple[int, int]], *, block_size: int = 4, **more: Any) -> StepPlan:
    """Rows given as (first position, count) of sequences with shuffled blocks."""
    tables = np.zeros((len(spans), 64), np.int32)
    order, taken = rng().permutation(64).astype(np.int32), 0
    for i, (start, count) in enumerate(spans):
        needed = -(-(start + count) // block_size)
        tables[i, :needed] = order[taken : taken + needed]
        taken += needed
    positions = np.concatenate([np.arange(start, start + count) for start, count in spans]).astype(np.int32)
    sequences = np.repeat(np.arange(len(spans)), [count for _, count in spans])
    slots = tables[sequences, positions // block_size] * block_size + positions % block_size
    return StepPlan(
        token_ids=np.arange(len(positions), dtype=np.int32), positions=positions, slots=slots.astype(np.int32),
        row_starts=np.cumsum([0, *(count for _, count in spans)]).astype(np.int32), block_tables=tables,
        logit_rows=np.arange(len(positions), dtype=np.int32), block_size=block_size, **more,
    )  # fmt: skip


def single_row(plan: StepPlan, row: int) -> StepPlan:
    """A plan of one row of the first sequence."""
    alone = plan_of([(0, 1)])
    alone.block_tables, alone.block_size = plan.block_tables[:1], plan.block_size
    for field in ("token_ids", "positions", "slots"):
        setattr(alone, field, getattr(plan, field)[row : row + 1])
    return alone


def run(backend: Any, code: Any, plan: StepPlan, hidden: np.ndarray) -> Mapping[str, np.ndarray]:
    given = torch.from_numpy(hidden).to(backend.torch_device)
    outputs = backend.run(backend.prepare(code, hidden_width=hidden.shape[1]), plan, hidden=given)
    return {name: backend.numpy(x) for name, x in outputs.items()}


def tensor(values: np.ndarray) -> Tensor:
    raw = np.ascontiguousarray(values, np.float32)
    return make_tensor("w", raw.shape, "F32", raw.reshape(-1).view(np.uint8))


def floats(*shape: int) -> Tensor:
    return tensor(rng().standard_normal(shape))
