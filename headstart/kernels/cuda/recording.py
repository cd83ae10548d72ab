"""Programs as the device runs them again and again: one recording for each shape of plans, over buffers of its own.

A recording is made with a plan that does nothing, as making it runs it. Where the device has no graphs a program runs
at once. What a recording gives is valid until it runs again. Drawing from a recording's logits is a recording, too, of
its own: what the draws depend on is put together while the pass runs, and need not be there before it is launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from headstart.core import SamplingRows, StepPlan
from headstart.kernels.cuda.angles import Angles
from headstart.kernels.cuda.device import Device, said
from headstart.kernels.cuda.launch import Launcher
from headstart.kernels.cuda.mixing import Mixer
from headstart.kernels.cuda.ops import CudaOps
from headstart.kernels.cuda.plan import DevicePlan, Shape
from headstart.kernels.cuda.sampling import DrawRows, Sampler, is_edited, is_limited
from headstart.kernels.ops import Ops, Program

LOGIT_RESULTS = ("logits", "confidence")
"""Results with a row for each of plan.logit_rows; others have one for each row."""
MOST_ROWS, MOST_RECORDINGS = 256, 64
"""Passes of more rows run at once: launches are a small part of their time. Recordings of a program: the oldest goes
when there are more."""


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws from all logits of a recording; `rows`: with these parameters."""

    rows: DrawRows
    tokens: Tensor  # [L, 1]
    replay: Callable[[], None]


@dataclass(eq=False)
class Recording:
    """`rows`: the plan on the device; `hidden`: what the program reads; `replay`: compute `made` from these; `draws`
    from `made`: by their columns, and whether rows are limited."""

    rows: DevicePlan
    hidden: Tensor | None
    made: Mapping[str, Tensor]
    replay: Callable[[], None]
    version: int
    draws: dict[tuple[int, bool], Draws] = field(default_factory=dict)


@dataclass(eq=False)
class Handle:
    """A program, and how it was recorded: by shape, and whether plans tell hidden slots and states, and hidden
    states are given."""

    program: Program
    recordings: dict[tuple[Shape, bool, bool, bool], Recording] = field(default_factory=dict)


class Recorder:
    """Runs programs on one device."""

    def __init__(self, device: Device, launcher: Launcher) -> None:
        self.device, self._launcher = device, launcher
        self.angles, self._mixer = Angles(device.place), Mixer(launcher)
        self._of_logits: WeakValueDictionary[int, Recording] = WeakValueDictionary()

    @property
    def place(self) -> torch.device:
        return self.device.place

    def run(
        self, handle: Handle, plan: StepPlan, hidden_pool: Tensor | None, hidden: Tensor | None
    ) -> dict[str, Tensor]:
        """As Backend.run."""
        shape = Shape.of(plan)
        self.angles.cover(int(plan.positions.max()))
        recorded = self.device.graphs and shape.rows <= MOST_ROWS
        made = self._recorded if recorded else self._at_once
        found = made(handle, shape, plan, hidden_pool, hidden)
        counts = {name: len(plan.logit_rows) if name in LOGIT_RESULTS else plan.num_rows for name in found}
        return {name: x[: counts[name]] for name, x in found.items()}

    def _at_once(
        self, handle: Handle, shape: Shape, plan: StepPlan, hidden_pool: Tensor | None, hidden: Tensor | None
    ) -> Mapping[str, Tensor]:
        rows = DevicePlan(shape, self.place, plan)
        if hidden is not None:
            hidden = torch.nn.functional.pad(hidden, (0, 0, 0, shape.rows - len(hidden)))
        elif hidden_pool is not None and plan.hidden_slots is not None:
            hidden = hidden_pool.index_select(0, rows["hidden_slots"])
        return self.compute(handle.program, rows, hidden)

    def compute(self, program: Program, rows: DevicePlan, hidden: Tensor | None) -> Mapping[str, Tensor]:
        """What a program makes of all rows of a plan, those that fill it up too."""
        with said("a pass"):
            ops = CudaOps(self._launcher, rows, self.angles, self._mixer)
            return program(cast(Ops, ops), ops.inputs(hidden))

    def _recorded(
        self, handle: Handle, shape: Shape, plan: StepPlan, hidden_pool: Tensor | None, hidden: Tensor | None
    ) -> Mapping[str, Tensor]:
        stored = hidden_pool if hidden is None and plan.hidden_slots is not None else None
        key = shape, plan.hidden_slots is not None, plan.states is not None, hidden is not None
        known = handle.recordings.get(key)
        if known is None or known.version != self.angles.version:
            known = self._record(handle.program, shape, plan, stored, hidden)
            handle.recordings[key] = known
            while len(handle.recordings) > MOST_RECORDINGS:
                del handle.recordings[next(iter(handle.recordings))]
        known.rows.update(plan)
        if hidden is not None:
            assert known.hidden is not None
            known.hidden[: len(hidden)] = hidden
        known.replay()
        return known.made

    def _record(
        self, program: Program, shape: Shape, plan: StepPlan, hidden_pool: Tensor | None, hidden: Tensor | None
    ) -> Recording:
        rows = DevicePlan(shape, self.place, plan)
        rows.clear()
        given = None if hidden is None else torch.zeros((shape.rows, hidden.shape[1]), device=self.place)

        def work() -> Mapping[str, Tensor]:
            read = given if hidden_pool is None else hidden_pool.index_select(0, rows["hidden_slots"])
            return self.compute(program, rows, read)

        version = self.angles.version
        made, replay = self.device.record(work)
        recording = Recording(rows, given, made, replay, version)
        if "logits" in made:  # no other tensor lies there while the recording lives
            self._of_logits[made["logits"].data_ptr()] = recording
        return recording

    def drawn(self, sampler: Sampler, logits: Tensor, rows: SamplingRows) -> Tensor | None:
        """Tokens [L, 1], valid until the next draw, of logits [L, W] that a recording has just made; None where they
        are no such, or rows are edited: then there are arrays of other sizes each time."""
        recording = self._of_logits.get(logits.data_ptr())
        if recording is None or is_edited(rows):
            return None
        key = logits.shape[1], is_limited(rows)
        known = recording.draws.get(key)
        if known is None:
            known = recording.draws[key] = self._record_draws(sampler, recording, logits.shape[1], rows)
        known.rows.update(rows)
        known.replay()
        return known.tokens[: len(rows)]

    def _record_draws(self, sampler: Sampler, recording: Recording, width: int, rows: SamplingRows) -> Draws:
        logits = recording.made["logits"][:, :width]
        filled = DrawRows.of(rows, self.place, len(logits))

        def work() -> Mapping[str, Tensor]:
            tokens = torch.empty((filled.count, 1), dtype=torch.int64, device=self.place)
            sampler.draw(logits, filled, None, tokens)
            return {"tokens": tokens}

        made, replay = self.device.record(work)
        return Draws(filled, made["tokens"], replay)
