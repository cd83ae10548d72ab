"""The work of whole drafts on the device: judge what the pass before has drawn, run the first program, draw, run the
next. All that changes from call to call lies in buffers of one shape, so the device may record a loop as one graph.

Shapes: S sequences of a bucket, D tokens of the longest draft, W logits of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core import SamplingRows, StepPlan
from headstart.kernels.cuda.arrival import sent
from headstart.kernels.cuda.kernels import drafting as kernels
from headstart.kernels.cuda.plan import DevicePlan, Shape
from headstart.kernels.cuda.recording import Handle, Recorder
from headstart.kernels.cuda.sampling import DrawRows, Sampler

MOST_JUDGED = 32
"""Drafted tokens of a sequence, and one more, at most."""
FIRST, JUDGED, ACCEPTED, DRAW, BASE, DEPTH, ROWS = range(7)
"""Rows of `told`: a sequence's first row in the first pass; how many drafted tokens are judged (-1: none); of these
accepted whatever was drawn (-1: what was drawn says it); its first draw; the position of its first drafted token if
none is accepted; tokens to draft; rows of the first pass before those judged."""
Told = NDArray[np.int32]


@dataclass(frozen=True)
class LoopShape:
    """What a loop is recorded for: its first pass and that of a step; draws that are judged; tokens of the longest
    draft; are tokens scored, hidden states stored ones, rows limited?"""

    first: Shape
    step: Shape
    draws: int
    longest: int
    scored: bool
    stored: bool
    limited: bool


@dataclass(frozen=True)
class Programs:
    """Of one drafter: the first is whose recording it is, others by step with the rows before theirs."""

    first: Handle
    steps: Sequence[tuple[Handle, int]]
    vocab_size: int
    token_ids: Tensor | None
    rows_given: bool


@dataclass(frozen=True)
class Inputs:
    """Of one call: plans of the first pass and of steps; `told` [7, S]; drafted tokens [S, MOST_JUDGED]; the rows of
    the first pass's logits that each step draws from [D, S], of programs with `rows_given`; and parameters."""

    plan: StepPlan
    step: StepPlan
    told: Told
    drafted: Told
    places: NDArray[np.int64]
    rows: SamplingRows
    draws: Tensor | None


@dataclass(eq=False)
class Loop:
    """Buffers of one shape, and what is done with them. Its result [S, 2 D + 1] of int32: tokens, bits of scores
    (float32: logprobs, or if `sure` logits of a confidence), and how many judged tokens were accepted."""

    recorder: Recorder
    sampler: Sampler
    programs: Programs
    shape: LoopShape
    inputs: Inputs
    hidden_pool: Tensor | None
    version: int = -1
    sure: bool = False
    _recording: tuple[Mapping[str, Tensor], Callable[[], None]] | None = None

    def __post_init__(self) -> None:
        place, shape, given = self.recorder.place, self.shape, self.inputs
        self._plan = DevicePlan(shape.first, place, given.plan)
        self._step = DevicePlan(shape.step, place, given.step)
        self._told, self._drafted, self._places = (
            sent(each, place) for each in (given.told, given.drafted, given.places)
        )
        self._draws = torch.zeros(max(shape.draws, 1), dtype=torch.int64, device=place)
        self._rows = DrawRows.of(given.rows, place, shape.step.rows)
        self._take_draws(given)

    def put(self, inputs: Inputs) -> None:
        """Another call's, of this shape."""
        self._plan.update(inputs.plan)
        self._step.update(inputs.step)
        for place, array in ((self._told, inputs.told), (self._drafted, inputs.drafted), (self._places, inputs.places)):
            place.copy_(torch.from_numpy(array), non_blocking=True)
        self._rows.update(inputs.rows)
        self._take_draws(inputs)

    def _clear(self) -> None:
        """Inputs that store nothing."""
        self._plan.clear()
        self._step.clear()
        self._told.zero_()
        self._told[JUDGED].fill_(-1)

    def _take_draws(self, inputs: Inputs) -> None:
        if inputs.draws is not None:
            self._draws[: len(inputs.draws)] = inputs.draws[:, 0]

    def record(self, version: int) -> None:
        """With inputs that do nothing, as recording runs the work."""
        self._clear()
        self.version = version
        made, replay = self.recorder.device.record(self._work)
        self._recording = made, replay

    def run(self) -> Tensor:
        """The result, valid until the next run."""
        if self._recording is None:
            return self._work()["result"]
        made, replay = self._recording
        replay()
        return made["result"]

    def _work(self) -> Mapping[str, Tensor]:
        shape, plan, rows = self.shape, self._plan, self._rows
        count, longest = shape.step.rows, shape.longest
        place = self.recorder.place
        taken = torch.empty(count, dtype=torch.int32, device=place)
        tokens = torch.empty(count, longest, dtype=torch.int64, device=place)
        scores = torch.zeros(count, longest, device=place)
        kernels.judge[(count,)](
            self._told, self._drafted, self._draws, plan["token_ids"], plan["slots"], plan["sees"], plan["logit_rows"],
            rows.ints, taken, count, MOST=MOST_JUDGED,
        )  # fmt: skip
        stored = self.hidden_pool.index_select(0, plan["hidden_slots"]) if self.hidden_pool is not None else None
        made = self.recorder.compute(self.programs.first.program, plan, stored)
        if self.programs.rows_given:
            self.sure = "confidence" in made
            self._draw_given(made, tokens, scores, taken)
        else:
            self._grow(made, tokens, scores, taken)
        return {"result": torch.cat([tokens.int(), scores.view(torch.int32), taken[:, None]], dim=1)}

    def _grow(self, made: Mapping[str, Tensor], tokens: Tensor, scores: Tensor, taken: Tensor) -> None:
        """Token after token, each from the logits of the step before; the vectors go with them."""
        hidden = made["hidden"].index_select(0, self._plan["logit_rows"][: self.shape.step.rows])
        logits = made["logits"]
        for number in range(self.shape.longest):
            self._draw(logits, tokens, scores, number, scored=self.shape.scored)
            if number + 1 < self.shape.longest:
                handle, before = self.programs.steps[number]
                made = self._next(handle, before, number + 1, tokens, taken, hidden)
                logits, hidden = made["logits"], made["hidden"]

    def _draw_given(self, made: Mapping[str, Tensor], tokens: Tensor, scores: Tensor, taken: Tensor) -> None:
        """From rows that are there; scores are logits of a confidence where there is one."""
        given, sure = made["logits"], made.get("confidence")
        for number in range(self.shape.longest):
            at = self._places[number]
            logits = given.index_select(0, at)
            confidence = None if sure is None else sure.index_select(0, at)[:, 0]
            if self.programs.steps:
                handle, before = self.programs.steps[0]
                found = self._next(handle, before, number, tokens, taken, logits)
                logits = found["logits"]
                if confidence is not None and "confidence" in found:
                    confidence = confidence + found["confidence"][:, 0]
            self._draw(logits, tokens, scores, number, scored=self.shape.scored and sure is None)
            if confidence is not None:
                scores[:, number] = confidence

    def _next(
        self, handle: Handle, before: int, number: int, tokens: Tensor, taken: Tensor, hidden: Tensor
    ) -> Mapping[str, Tensor]:
        step, shape = self._step, self.shape.step
        kernels.advance[(shape.rows,)](
            self._told, taken, tokens, self._plan["token_ids"], step["tables"], step["token_ids"], step["positions"],
            step["slots"], step["sees"], shape.rows, tokens.shape[1], number, before, shape.blocks, shape.block_size,
            shape.first_position,
        )  # fmt: skip
        return self.recorder.compute(handle.program, step, hidden)

    def _draw(self, logits: Tensor, tokens: Tensor, scores: Tensor, number: int, *, scored: bool) -> None:
        ids = self.programs.token_ids
        if ids is None:
            logits = logits[:, : self.programs.vocab_size]
        self.sampler.draw(logits, self._rows, ids, tokens, number)
        if scored:
            self.sampler.logprobs(logits, tokens, ids, scores, number)
