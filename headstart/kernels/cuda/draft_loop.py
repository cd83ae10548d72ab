"""Drafting several tokens on the device (kernels/draft_loop.py): each step reads the token that the step before
sampled.

The host waits once, for all tokens. Tokens after a gate's stop are drafted and dropped: waiting for each token would
cost more. `draft_early` starts after a pass whose samples are not known yet: the device decides how many drafted
tokens are accepted, and the host reads the samples while the next drafts are made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core import Int32, SamplingRows, StepPlan
from headstart.kernels.cuda.device import HostCopy, copy_to_device
from headstart.kernels.cuda.kernels import sampling as kernels
from headstart.kernels.cuda.plan import DevicePlan, PlanShape, bucket_of
from headstart.kernels.cuda.recording import MAX_ROWS, CudaProgram, GraphRecorder
from headstart.kernels.cuda.sampling import CudaSampler, DeviceSamplingRows, is_edited, is_limited
from headstart.kernels.draft_loop import DraftedTokens, GateRule, GateState, VerifyInputs, confidence_of

MAX_VERIFIED = 32  # drafted tokens of a sequence plus one, at most
MAX_GRAPHS = 32  # recorded graphs per draft loop; the oldest is dropped
Drafts = list[tuple[list[int], list[float]]]


@dataclass(frozen=True)
class DraftShape:
    """Sizes and options that a draft graph is recorded for."""

    first: PlanShape  # of the first pass
    step: PlanShape  # of the passes of later steps
    draws: int  # samples to verify against
    longest: int  # tokens of the longest draft
    scored: bool  # compute the tokens' log-probabilities
    stored: bool  # the first pass reads stored hidden states
    limited: bool  # rows use min-p, top-k or top-p


@dataclass(frozen=True)
class DraftPrograms:
    """Programs of one drafter."""

    first: CudaProgram
    steps: Sequence[tuple[CudaProgram, int]]  # by step: the program, and rows between the sequence's tokens and its row
    vocab_size: int
    token_ids: Tensor | None  # [V'] target ids of a reduced draft vocabulary
    is_block: bool


@dataclass(frozen=True)
class DraftInputs:
    """Inputs of one call; S sequences of a bucket, D tokens of the longest draft."""

    plan: StepPlan  # of the first pass
    step: StepPlan  # of later steps, with one row per sequence
    controls: Int32  # [kernels.NUM_CONTROLS, S]
    drafted: Int32  # [S, MAX_VERIFIED] drafted tokens to verify
    logit_rows: NDArray[np.int64]  # [D, S] with is_block: the row of the first pass's logits for each step
    rows: SamplingRows
    draws: Tensor | None  # [L, 1] samples to verify against


@dataclass(eq=False)
class DraftGraph:
    """Device buffers of one shape, and the work over them, which the device may record as one graph.

    The result [S, 2 D + 1] int32: tokens, bits of float32 scores (log-probabilities, or confidence logits if
    `has_confidence`), and the number of accepted tokens."""

    recorder: GraphRecorder
    sampler: CudaSampler
    programs: DraftPrograms
    shape: DraftShape
    inputs: DraftInputs
    hidden_pool: Tensor | None
    version: int = -1  # of the position tables at recording
    has_confidence: bool = False
    _recording: tuple[Mapping[str, Tensor], Callable[[], None]] | None = None

    def __post_init__(self) -> None:
        device, shape, inputs = self.recorder.torch_device, self.shape, self.inputs
        self._plan = DevicePlan(shape.first, device, inputs.plan)
        self._step = DevicePlan(shape.step, device, inputs.step)
        self._controls, self._drafted, self._logit_rows = (
            copy_to_device(each, device) for each in (inputs.controls, inputs.drafted, inputs.logit_rows)
        )
        self._draws = torch.zeros(max(shape.draws, 1), dtype=torch.int64, device=device)
        self._rows = DeviceSamplingRows.of(inputs.rows, device, shape.step.rows)
        self._put_draws(inputs)

    def put(self, inputs: DraftInputs) -> None:
        """Copy the inputs of another call of this shape into the buffers."""
        self._plan.update(inputs.plan)
        self._step.update(inputs.step)
        for buffer, array in (
            (self._controls, inputs.controls), (self._drafted, inputs.drafted), (self._logit_rows, inputs.logit_rows)
        ):  # fmt: skip
            buffer.copy_(torch.from_numpy(array), non_blocking=True)
        self._rows.update(inputs.rows)
        self._put_draws(inputs)

    def _put_draws(self, inputs: DraftInputs) -> None:
        if inputs.draws is not None:
            self._draws[: len(inputs.draws)] = inputs.draws[:, 0]

    def record(self, version: int) -> None:
        """Record the work as a graph, with inputs that store nothing because recording runs the work."""
        self._plan.clear()
        self._step.clear()
        self._controls.zero_()
        self._controls[kernels.NUM_DRAFTED.value].fill_(-1)
        self.version = version
        self._recording = self.recorder.device.record(self._work)

    def run(self) -> Tensor:
        """The result, valid until the next run."""
        if self._recording is None:
            return self._work()["result"]
        results, replay = self._recording
        replay()
        return results["result"]

    def _work(self) -> Mapping[str, Tensor]:
        shape, plan, rows = self.shape, self._plan, self._rows
        count, longest, device = shape.step.rows, shape.longest, self.recorder.torch_device
        accepted = torch.empty(count, dtype=torch.int32, device=device)
        tokens = torch.empty(count, longest, dtype=torch.int64, device=device)
        scores = torch.zeros(count, longest, device=device)
        kernels.verify[(count,)](
            self._controls, self._drafted, self._draws, plan["token_ids"], plan["slots"], plan["visible_end"],
            plan["logit_rows"], rows.ints, accepted, count, MAX_VERIFIED=MAX_VERIFIED,
        )  # fmt: skip
        stored = self.hidden_pool.index_select(0, plan["hidden_slots"]) if self.hidden_pool is not None else None
        results = self.recorder.compute(self.programs.first.program, plan, stored)
        if self.programs.is_block:
            self.has_confidence = "confidence" in results
            self._sample_block(results, tokens, scores, accepted)
        else:
            self._sample_chain(results, tokens, scores, accepted)
        return {"result": torch.cat([tokens.int(), scores.view(torch.int32), accepted[:, None]], dim=1)}

    def _sample_chain(self, results: Mapping[str, Tensor], tokens: Tensor, scores: Tensor, accepted: Tensor) -> None:
        """Sample token after token; each step reads the token and hidden state of the step before."""
        hidden = results["hidden"].index_select(0, self._plan["logit_rows"][: self.shape.step.rows])
        logits = results["logits"]
        for depth in range(self.shape.longest):
            self._sample(logits, tokens, scores, depth, scored=self.shape.scored)
            if depth + 1 < self.shape.longest:
                program, rows_before = self.programs.steps[depth]
                results = self._run_step(program, rows_before, depth + 1, tokens, accepted, hidden)
                logits, hidden = results["logits"], results["hidden"]

    def _sample_block(self, results: Mapping[str, Tensor], tokens: Tensor, scores: Tensor, accepted: Tensor) -> None:
        """Sample all tokens from the first pass's logits; scores are confidence logits if there are any."""
        all_logits, confidences = results["logits"], results.get("confidence")
        carry: Tensor | None = None
        for depth in range(self.shape.longest):
            rows = self._logit_rows[depth]
            logits = all_logits.index_select(0, rows)
            confidence = None if confidences is None else confidences.index_select(0, rows)[:, 0]
            if self.programs.steps:
                program, rows_before = self.programs.steps[0]
                if carry is not None:
                    logits[:, -carry.shape[1] :] = carry
                step = self._run_step(program, rows_before, depth, tokens, accepted, logits)
                logits, carry = step["logits"], step.get("carry")
                if confidence is not None and "confidence" in step:
                    confidence = confidence + step["confidence"][:, 0]
            self._sample(logits, tokens, scores, depth, scored=self.shape.scored and confidence is None)
            if confidence is not None:
                scores[:, depth] = confidence

    def _run_step(
        self, program: CudaProgram, rows_before: int, depth: int, tokens: Tensor, accepted: Tensor, hidden: Tensor
    ) -> Mapping[str, Tensor]:
        step, shape = self._step, self.shape.step
        kernels.advance[(shape.rows,)](
            self._controls, accepted, tokens, self._plan["token_ids"], step["tables"], step["token_ids"],
            step["positions"], step["slots"], step["visible_end"], shape.rows, tokens.shape[1], depth, rows_before,
            shape.blocks, shape.block_size, shape.first_position,
            step["rope_positions"] if shape.num_axes else None, NUM_AXES=shape.num_axes,
        )  # fmt: skip
        return self.recorder.compute(program.program, step, hidden)

    def _sample(self, logits: Tensor, tokens: Tensor, scores: Tensor, depth: int, *, scored: bool) -> None:
        ids = self.programs.token_ids
        if ids is None:
            logits = logits[:, : self.programs.vocab_size]
        self.sampler.draw(logits, self._rows, ids, tokens, depth)
        if scored:
            self.sampler.logprobs(logits, tokens, ids, scores, depth)


@dataclass(frozen=True, eq=False)
class CudaPendingDrafts:
    """`PendingDrafts` of the result of a DraftGraph."""

    depths: Sequence[int]
    longest: int
    result: HostCopy
    has_confidence: bool

    def accepted(self) -> list[int]:
        counts: list[int] = self.result.numpy()[: len(self.depths), -1].tolist()
        return counts

    def drafts(self, gates: Sequence[GateRule | None]) -> Drafts:
        result = self.result.numpy()[: len(self.depths)]
        tokens, scores = result[:, : self.longest], np.ascontiguousarray(result[:, self.longest : -1]).view(np.float32)
        return [
            _cut(tokens[i, :depth].tolist(), scores[i].tolist(), gates[i], has_confidence=self.has_confidence)
            for i, depth in enumerate(self.depths)
        ]


class CudaDraftLoop:
    """`EarlyDraftLoop` of prepared programs (see Backend.prepare_draft_loop)."""

    def __init__(
        self, recorder: GraphRecorder, sampler: CudaSampler, steps: Sequence[tuple[CudaProgram, int]], *,
        vocab_size: int, token_ids: Tensor | None, is_block: bool,
    ) -> None:  # fmt: skip
        self._recorder, self._sampler, self._steps = recorder, sampler, steps
        self._vocab_size, self._token_ids, self._is_block = vocab_size, token_ids, is_block
        self._graphs: dict[tuple[CudaProgram, DraftShape], DraftGraph] = {}

    @torch.inference_mode()
    def draft(
        self, first: CudaProgram, plan: StepPlan, rows: SamplingRows, depths: Sequence[int],
        gates: Sequence[GateRule | None], widths: Sequence[int], *, hidden_pool: Tensor | None = None,
    ) -> list[DraftedTokens]:  # fmt: skip
        scored = any(gate is not None for gate in gates)
        started = self._start(first, plan, rows, depths, None, scored=scored, hidden_pool=hidden_pool)
        return [(tokens, scores, ()) for tokens, scores in started.drafts(gates)]

    @torch.inference_mode()
    def draft_early(
        self, first: CudaProgram, plan: StepPlan, rows: SamplingRows, depths: Sequence[int],
        verify_inputs: VerifyInputs, *, scored: bool, hidden_pool: Tensor | None = None,
    ) -> CudaPendingDrafts:  # fmt: skip
        return self._start(first, plan, rows, depths, verify_inputs, scored=scored, hidden_pool=hidden_pool)

    def _start(
        self, first: CudaProgram, plan: StepPlan, rows: SamplingRows, depths: Sequence[int],
        verify_inputs: VerifyInputs | None, *, scored: bool, hidden_pool: Tensor | None,
    ) -> CudaPendingDrafts:  # fmt: skip
        stored = None if plan.hidden_slots is None else hidden_pool
        inputs, longest = _inputs(plan, rows, depths, verify_inputs)
        shape = DraftShape(
            first=PlanShape.of(plan), step=PlanShape.of(inputs.step), longest=longest, scored=scored,
            draws=0 if inputs.draws is None else bucket_of(len(inputs.draws)), stored=stored is not None,
            limited=is_limited(rows),
        )  # fmt: skip
        self._recorder.tables.cover(int(plan.positions.max()) + longest)
        can_record = self._recorder.device.graphs and shape.first.rows <= MAX_ROWS and not is_edited(rows)
        graph = (self._recorded if can_record else self._new_graph)(first, shape, inputs, stored)
        return CudaPendingDrafts(depths, longest, HostCopy(graph.run()), graph.has_confidence)

    def _new_graph(
        self, first: CudaProgram, shape: DraftShape, inputs: DraftInputs, hidden_pool: Tensor | None
    ) -> DraftGraph:
        programs = DraftPrograms(first, self._steps, self._vocab_size, self._token_ids, self._is_block)
        return DraftGraph(self._recorder, self._sampler, programs, shape, inputs, hidden_pool)

    def _recorded(
        self, first: CudaProgram, shape: DraftShape, inputs: DraftInputs, hidden_pool: Tensor | None
    ) -> DraftGraph:
        key, version = (first, shape), self._recorder.tables.version
        graph = self._graphs.get(key)
        if graph is None or graph.version != version:
            self._graphs[key] = graph = self._new_graph(first, shape, inputs, hidden_pool)
            graph.record(version)
            while len(self._graphs) > MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        graph.put(inputs)
        return graph


def _inputs(
    plan: StepPlan, rows: SamplingRows, depths: Sequence[int], verify_inputs: VerifyInputs | None
) -> tuple[DraftInputs, int]:
    """Inputs of a call, padded to a bucket of sequences, and the number of tokens of the longest draft."""
    num, longest = len(depths), max(depths)
    count, starts = bucket_of(num), np.arange(num + 1, dtype=np.int32)
    controls, drafted = np.zeros((kernels.NUM_CONTROLS, count), np.int32), np.zeros((count, MAX_VERIFIED), np.int32)
    controls[kernels.NUM_DRAFTED] = controls[kernels.FIXED_ACCEPTED] = -1
    controls[kernels.FIRST_ROW, :num], controls[kernels.DEPTH, :num] = plan.row_starts[:-1], depths
    controls[kernels.BASE_POSITION, :num] = rows.position
    if verify_inputs is not None:
        controls[kernels.FIRST_SAMPLE, :num] = verify_inputs.starts
        controls[kernels.KNOWN_ROWS, :num] = verify_inputs.known
        controls[kernels.FIXED_ACCEPTED, :num] = [-1 if fixed is None else fixed for fixed in verify_inputs.accepted]
        for i, draft in enumerate(verify_inputs.drafted):
            controls[kernels.NUM_DRAFTED, i], drafted[i, : len(draft)] = len(draft), draft
    firsts = np.fromiter(accumulate(depths, initial=0), np.int64)[:-1]
    logit_rows = np.zeros((longest, count), np.int64)
    for depth in range(longest):
        logit_rows[depth, :num] = firsts + np.where(np.array(depths) > depth, depth, 0)
    rope_positions = None
    if plan.rope_positions is not None:
        last = plan.row_starts[1:] - 1
        controls[kernels.ROPE_SHIFT, :num] = plan.rope_positions[last].max(1) - plan.positions[last]
        rope_positions = np.zeros((num, plan.rope_positions.shape[1]), np.int32)
    step = StepPlan(
        token_ids=np.zeros(num, np.int32), positions=np.full(num, plan.first_position, np.int32),
        slots=np.full(num, -1, np.int32), visible_end=np.full(num, -1, np.int32), row_starts=starts,
        block_tables=plan.block_tables, logit_rows=starts[:-1], first_position=plan.first_position,
        block_size=plan.block_size, rope_positions=rope_positions,
    )  # fmt: skip
    draws = None if verify_inputs is None else verify_inputs.sample.tokens
    return DraftInputs(plan, step, controls, drafted, logit_rows, rows, draws), longest


def _cut(
    tokens: list[int], scores: list[float], gate: GateRule | None, *, has_confidence: bool
) -> tuple[list[int], list[float]]:
    """A draft up to the first failed token or its gate's stop, and its scores as probabilities."""
    kept: list[int] = []
    probabilities: list[float] = []
    state = None if gate is None else GateState(gate)
    for token, score in zip(tokens, scores, strict=False):
        if token < 0:
            break
        kept.append(token)
        if has_confidence:
            probabilities.append(confidence_of(score))
        elif state:
            probabilities.append(math.exp(score))
        if state and not state.should_continue(len(kept) - 1, probabilities[-1]):
            break
    return kept, probabilities
