"""Whole drafts on the device (kernels/chain.py): each step reads the token that the one before has drawn, and the host
waits once, for all tokens. What a gate would have ended is drafted and dropped: waiting for each token costs more.

`begin` has them made behind a pass whose draws are not known yet: what of them stands is decided on the device, and the
host reads the draws while the drafts are made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from headstart.core import SamplingRows, StepPlan
from headstart.kernels.chain import GateRule, Judged
from headstart.kernels.cuda.arrival import Arrival
from headstart.kernels.cuda.loop import (
    ACCEPTED,
    BASE,
    DEPTH,
    DRAW,
    FIRST,
    JUDGED,
    MOST_JUDGED,
    ROWS,
    Inputs,
    Loop,
    LoopShape,
    Programs,
)
from headstart.kernels.cuda.plan import Shape, bucket_of
from headstart.kernels.cuda.recording import MOST_ROWS, Handle, Recorder
from headstart.kernels.cuda.sampling import Sampler, is_edited, is_limited

MOST_LOGIT = 80.0
"""Of a confidence: where e^x ends (as in csrc/chain.cpp)."""
MOST_LOOPS = 32
"""Recordings of a chain: the oldest goes when there are more."""
Drafts = list[tuple[list[int], list[float]]]


@dataclass(frozen=True, eq=False)
class CudaBegun:
    """`Begun`: drafts that are being made. `result`: see Loop."""

    depths: Sequence[int]
    longest: int
    result: Arrival
    sure: bool

    def accepted(self) -> list[int]:
        taken: list[int] = self.result.numpy()[: len(self.depths), -1].tolist()
        return taken

    def drafts(self, gates: Sequence[GateRule | None]) -> Drafts:
        found = self.result.numpy()[: len(self.depths)]
        tokens, scores = found[:, : self.longest], np.ascontiguousarray(found[:, self.longest : -1]).view(np.float32)
        return [
            _cut(tokens[i, :depth].tolist(), scores[i].tolist(), gates[i], sure=self.sure)
            for i, depth in enumerate(self.depths)
        ]


class CudaChain:
    """`EarlyChain` of prepared programs. `steps`: handles, and how many rows lie between the true ones and theirs."""

    def __init__(
        self,
        recorder: Recorder,
        sampler: Sampler,
        steps: Sequence[tuple[Handle, int]],
        *,
        vocab_size: int,
        token_ids: Tensor | None,
        rows_given: bool,
    ) -> None:
        self._recorder, self._sampler, self._steps = recorder, sampler, steps
        self._vocab_size, self._token_ids, self._rows_given = vocab_size, token_ids, rows_given
        self._loops: dict[tuple[Handle, LoopShape], Loop] = {}

    @torch.inference_mode()
    def draft(
        self,
        first: Handle,
        plan: StepPlan,
        rows: SamplingRows,
        depths: Sequence[int],
        gates: Sequence[GateRule | None],
        *,
        hidden_pool: Tensor | None = None,
    ) -> Drafts:
        scored = any(gate is not None for gate in gates)
        return self._begin(first, plan, rows, depths, None, scored=scored, hidden_pool=hidden_pool).drafts(gates)

    @torch.inference_mode()
    def begin(
        self,
        first: Handle,
        plan: StepPlan,
        rows: SamplingRows,
        depths: Sequence[int],
        judged: Judged,
        *,
        scored: bool,
        hidden_pool: Tensor | None = None,
    ) -> CudaBegun:
        return self._begin(first, plan, rows, depths, judged, scored=scored, hidden_pool=hidden_pool)

    def _begin(
        self,
        first: Handle,
        plan: StepPlan,
        rows: SamplingRows,
        depths: Sequence[int],
        judged: Judged | None,
        *,
        scored: bool,
        hidden_pool: Tensor | None,
    ) -> CudaBegun:
        stored = None if plan.hidden_slots is None else hidden_pool
        inputs, longest = _inputs(plan, rows, depths, judged)
        shape = LoopShape(
            first=Shape.of(plan), step=Shape.of(inputs.step), longest=longest, scored=scored,
            draws=0 if inputs.draws is None else bucket_of(len(inputs.draws)), stored=stored is not None,
            limited=is_limited(rows),
        )  # fmt: skip
        self._recorder.angles.cover(int(plan.positions.max()) + longest)
        recorded = self._recorder.device.graphs and shape.first.rows <= MOST_ROWS and not is_edited(rows)
        loop = self._recorded(first, shape, inputs, stored) if recorded else self._made(first, shape, inputs, stored)
        return CudaBegun(depths, longest, Arrival(loop.run()), loop.sure)

    def _made(self, first: Handle, shape: LoopShape, inputs: Inputs, hidden_pool: Tensor | None) -> Loop:
        programs = Programs(first, self._steps, self._vocab_size, self._token_ids, self._rows_given)
        return Loop(self._recorder, self._sampler, programs, shape, inputs, hidden_pool)

    def _recorded(self, first: Handle, shape: LoopShape, inputs: Inputs, hidden_pool: Tensor | None) -> Loop:
        key, version = (first, shape), self._recorder.angles.version
        loop = self._loops.get(key)
        if loop is None or loop.version != version:
            self._loops[key] = loop = self._made(first, shape, inputs, hidden_pool)
            loop.record(version)
            while len(self._loops) > MOST_LOOPS:
                del self._loops[next(iter(self._loops))]
        loop.put(inputs)
        return loop


def _inputs(plan: StepPlan, rows: SamplingRows, depths: Sequence[int], judged: Judged | None) -> tuple[Inputs, int]:
    """Buffers of a call, filled up to a bucket of sequences, and the tokens of its longest draft."""
    num, longest = len(depths), max(depths)
    count, each = bucket_of(num), np.arange(num + 1, dtype=np.int32)
    told, drafted = np.zeros((7, count), np.int32), np.zeros((count, MOST_JUDGED), np.int32)
    told[JUDGED] = told[ACCEPTED] = -1
    told[FIRST, :num], told[DEPTH, :num], told[BASE, :num] = plan.row_starts[:-1], depths, rows.position
    if judged is not None:
        told[DRAW, :num], told[ROWS, :num] = judged.starts, judged.known
        told[ACCEPTED, :num] = [-1 if given is None else given for given in judged.accepted]
        for i, draft in enumerate(judged.drafted):
            told[JUDGED, i], drafted[i, : len(draft)] = len(draft), draft
    starts = np.fromiter(accumulate(depths, initial=0), np.int64)[:-1]
    places = np.zeros((longest, count), np.int64)
    for number in range(longest):
        places[number, :num] = starts + np.where(np.array(depths) > number, number, 0)
    step = StepPlan(
        token_ids=np.zeros(num, np.int32),
        positions=np.full(num, plan.first_position, np.int32),
        slots=np.full(num, -1, np.int32),
        sees=np.full(num, -1, np.int32),
        row_starts=each,
        block_tables=plan.block_tables,
        logit_rows=each[:-1],
        first_position=plan.first_position,
        block_size=plan.block_size,
    )
    return Inputs(plan, step, told, drafted, places, rows, None if judged is None else judged.drawn.tokens), longest


def _cut(tokens: list[int], scores: list[float], gate: GateRule | None, *, sure: bool) -> tuple[list[int], list[float]]:
    """A draft as far as there are tokens and its gate lets it; scores are logprobs, or of the confidence if `sure`."""
    kept: list[int] = []
    said: list[float] = []
    going = None if gate is None else Going(gate)
    for token, score in zip(tokens, scores, strict=False):
        if token < 0:
            break
        kept.append(token)
        if sure:
            said.append(1 / (1 + math.exp(-max(score, -MOST_LOGIT))))
        elif going:
            said.append(math.exp(score))
        if going and not going.goes_on(len(kept) - 1, said[-1]):
            break
    return kept, said


class Going:
    """A GateRule while a draft grows."""

    def __init__(self, rule: GateRule) -> None:
        self._rule, self._chance = rule, 1.0

    def goes_on(self, place: int, score: float) -> bool:
        """Called once after each token: shall there be one more behind that of `place`?"""
        rule, tables = self._rule, self._rule.tables
        here, after = tables[min(place, len(tables) - 1)], tables[min(place + 1, len(tables) - 1)]
        number = int(np.searchsorted(rule.edges, score, side="right"))
        self._chance *= min(1.0, rule.factor * (here.hits[number] / here.tries[number]))
        if self._chance * rule.token_s < rule.row_s:
            return False
        worth = self._chance * rule.factor * rule.token_s
        tries, hits = (np.asarray(each).tolist() for each in (after.tries, after.hits))
        whole = sum(tries)
        gains = (n / whole * (h / n * worth - rule.row_s) for n, h in zip(tries, hits, strict=True)
                 if h / n * worth > rule.row_s)  # fmt: skip
        return bool(sum(gains) > rule.draft_s)
