"""Records programs as CUDA graphs, one per padded plan shape, each over its own buffers.

Recording runs the program, so it uses a plan of inactive rows. Without graph support a program runs directly. Results
are valid until the recording runs again. Sampling from a recording's logits is a recording of its own, because its
inputs are prepared while the pass runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from headstart.core import SamplingRows, StepPlan
from headstart.kernels.cuda.device import CudaDevice, explain_out_of_memory
from headstart.kernels.cuda.grouped_products import GroupedProducts
from headstart.kernels.cuda.launch import KernelLauncher
from headstart.kernels.cuda.ops import CudaOps, PositionTables
from headstart.kernels.cuda.plan import DevicePlan, PlanShape
from headstart.kernels.cuda.sampling import CudaSampler, DeviceSamplingRows, is_edited, is_limited
from headstart.kernels.ops import Ops, Program

LOGIT_RESULTS = ("logits", "confidence")  # results with a row for each of plan.logit_rows; others have one for each row
MAX_ROWS, MAX_RECORDINGS = 256, 64
"""Passes of more than MAX_ROWS rows run directly: launches are a small part of their time. A program keeps at most
MAX_RECORDINGS recordings; the oldest is dropped."""


@dataclass(frozen=True, eq=False)
class SamplingRecording:
    """Recorded sampling from the logits of a PassRecording."""

    rows: DeviceSamplingRows  # parameters, updated before each replay
    tokens: Tensor  # [L, 1]
    replay: Callable[[], None]


@dataclass(eq=False)
class PassRecording:
    """A recorded program with its buffers."""

    rows: DevicePlan  # input, updated before each replay
    hidden: Tensor | None  # input [R, width]: hidden states that are not read from a pool
    results: Mapping[str, Tensor]
    replay: Callable[[], None]
    version: int  # of the position tables at recording
    sampling: dict[tuple[int, bool], SamplingRecording] = field(default_factory=dict)  # by (columns, is_limited)


@dataclass(eq=False)
class CudaProgram:
    """A program and its recordings."""

    program: Program
    # by (shape, plan has hidden slots, plan has states, hidden states are passed)
    recordings: dict[tuple[PlanShape, bool, bool, bool], PassRecording] = field(default_factory=dict)


class GraphRecorder:
    """Runs programs on one device, recorded where possible."""

    def __init__(self, device: CudaDevice, launcher: KernelLauncher) -> None:
        self.device, self._launcher = device, launcher
        self.tables, self._products = PositionTables(device.torch_device), GroupedProducts(launcher)
        self._by_logits: WeakValueDictionary[int, PassRecording] = WeakValueDictionary()

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device

    def run(
        self, handle: CudaProgram, plan: StepPlan, hidden_pool: Tensor | None, hidden: Tensor | None
    ) -> dict[str, Tensor]:
        """Backend.run."""
        shape = PlanShape.of(plan)
        self.tables.cover(int(plan.positions.max()))
        recorded = self.device.graphs and shape.rows <= MAX_ROWS
        run = self._run_recorded if recorded else self._run_directly
        results = run(handle, shape, plan, hidden_pool, hidden)
        counts = {name: len(plan.logit_rows) if name in LOGIT_RESULTS else plan.num_rows for name in results}
        return {name: x[: counts[name]] for name, x in results.items()}

    def _run_directly(
        self, handle: CudaProgram, shape: PlanShape, plan: StepPlan, hidden_pool: Tensor | None, hidden: Tensor | None
    ) -> Mapping[str, Tensor]:
        rows = DevicePlan(shape, self.torch_device, plan)
        if hidden is not None:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, shape.rows - len(hidden)))
        elif hidden_pool is not None and plan.hidden_slots is not None:
            hidden = hidden_pool.index_select(0, rows["hidden_slots"])
        return self.compute(handle.program, rows, hidden)

    def compute(self, program: Program, rows: DevicePlan, hidden: Tensor | None) -> Mapping[str, Tensor]:
        """Run a program on all rows of a plan, padding included."""
        with explain_out_of_memory("a pass"):
            ops = CudaOps(self._launcher, rows, self.tables, self._products)
            return program(cast(Ops, ops), ops.inputs(hidden))

    def _run_recorded(
        self, handle: CudaProgram, shape: PlanShape, plan: StepPlan, hidden_pool: Tensor | None, hidden: Tensor | None
    ) -> Mapping[str, Tensor]:
        stored = hidden_pool if hidden is None and plan.hidden_slots is not None else None
        key = shape, plan.hidden_slots is not None, plan.states is not None, hidden is not None
        known = handle.recordings.get(key)
        if known is None or known.version != self.tables.version:
            known = self._record(handle.program, shape, plan, stored, hidden)
            handle.recordings[key] = known
            while len(handle.recordings) > MAX_RECORDINGS:
                del handle.recordings[next(iter(handle.recordings))]
        known.rows.update(plan)
        if hidden is not None:
            assert known.hidden is not None
            known.hidden[: len(hidden)] = hidden
        known.replay()
        return known.results

    def _record(
        self, program: Program, shape: PlanShape, plan: StepPlan, hidden_pool: Tensor | None, hidden: Tensor | None
    ) -> PassRecording:
        rows = DevicePlan(shape, self.torch_device, plan)
        rows.clear()
        passed = None if hidden is None else torch.zeros((shape.rows, hidden.shape[1]), device=self.torch_device)

        def work() -> Mapping[str, Tensor]:
            stored = passed if hidden_pool is None else hidden_pool.index_select(0, rows["hidden_slots"])
            return self.compute(program, rows, stored)

        version = self.tables.version
        results, replay = self.device.record(work)
        recording = PassRecording(rows, passed, results, replay, version)
        if "logits" in results:  # the address is unique while the recording lives
            self._by_logits[results["logits"].data_ptr()] = recording
        return recording

    def sample(self, sampler: CudaSampler, logits: Tensor, rows: SamplingRows) -> Tensor | None:
        """Sample from logits [L, W] of a recording's last run -> tokens [L, 1], valid until the next call.

        None if the logits are not a recording's, or if rows have edits, whose arrays change size."""
        recording = self._by_logits.get(logits.data_ptr())
        if recording is None or is_edited(rows):
            return None
        key = logits.shape[1], is_limited(rows)
        known = recording.sampling.get(key)
        if known is None:
            known = recording.sampling[key] = self._record_sampling(sampler, recording, logits.shape[1], rows)
        known.rows.update(rows)
        known.replay()
        return known.tokens[: len(rows)]

    def _record_sampling(
        self, sampler: CudaSampler, recording: PassRecording, width: int, rows: SamplingRows
    ) -> SamplingRecording:
        logits = recording.results["logits"][:, :width]
        padded = DeviceSamplingRows.of(rows, self.torch_device, len(logits))

        def work() -> Mapping[str, Tensor]:
            tokens = torch.empty((padded.count, 1), dtype=torch.int64, device=self.torch_device)
            sampler.draw(logits, padded, None, tokens)
            return {"tokens": tokens}

        results, replay = self.device.record(work)
        return SamplingRecording(padded, results["tokens"], replay)
