"""Whole drafts on the device (kernels/chain.py): each step reads the token that the one before has drawn, and the host
waits once, for all tokens. What a gate would have ended is drafted and dropped: waiting for each token costs more.

Shapes: S sequences, D tokens of the longest draft, L rows of logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core import SamplingRows, StepPlan
from headstart.kernels.chain import GateRule
from headstart.kernels.cuda.recording import Handle, Recorder
from headstart.kernels.cuda.sampling import DrawRows, Sampler

MOST_LOGIT = 80.0
"""Of a confidence: where e^x ends (as in csrc/chain.cpp)."""
Drafts = list[tuple[list[int], list[float]]]


@dataclass(eq=False)
class Growing:
    """Drafts of one call while they grow on the device: tokens [S, D], and logprobs or logits of confidence [S, D]."""

    plan: StepPlan
    rows: SamplingRows
    depths: NDArray[np.int64]
    drawing: DrawRows
    tokens: Tensor
    scores: Tensor

    @property
    def longest(self) -> int:
        return self.tokens.shape[1]

    def step(self, number: int, before: int) -> StepPlan:
        """One row for each sequence, `before` rows behind its tokens; those whose draft has fewer than `number` + 1
        tokens see and store nothing."""
        plan, count = self.plan, len(self.depths)
        going = self.depths > number
        positions = np.where(going, self.rows.position + before, plan.first_position)
        block, place = np.divmod(positions, plan.block_size)
        slots = plan.block_tables[np.arange(count), block] * plan.block_size + place
        each = np.arange(count + 1, dtype=np.int32)
        return StepPlan(
            token_ids=plan.token_ids[plan.row_starts[:-1]],
            positions=positions.astype(np.int32),
            slots=np.where(going, slots, -1).astype(np.int32),
            sees=np.where(going, positions, -1).astype(np.int32),
            row_starts=each,
            block_tables=plan.block_tables,
            logit_rows=each[:-1],
            first_position=plan.first_position,
            block_size=plan.block_size,
        )


class CudaChain:
    """`Chain` of prepared programs. `steps`: handles, and how many rows lie between the true ones and theirs."""

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
        made = self._recorder.run(first, plan, hidden_pool, None)
        place, size = made["logits"].device, (len(depths), max(depths))
        growing = Growing(
            plan, rows, np.array(depths), DrawRows.of(rows, place),
            torch.full(size, -1, dtype=torch.int64, device=place), torch.zeros(size, device=place),
        )  # fmt: skip
        scored = any(gate is not None for gate in gates)
        if self._rows_given:
            sure = self._draw_given(made, growing, scored=scored)
        else:
            self._grow(made, growing, scored=scored)
            sure = False
        tokens, scores = growing.tokens.cpu().numpy(), growing.scores.cpu().numpy()
        return [
            _cut(tokens[i, :depth].tolist(), scores[i].tolist(), gates[i], sure=sure) for i, depth in enumerate(depths)
        ]

    def _grow(self, made: dict[str, Tensor], growing: Growing, *, scored: bool) -> None:
        """Token after token, each from the logits of the step before; the vectors go with them."""
        logits = made["logits"]
        hidden = made["hidden"][torch.from_numpy(growing.plan.logit_rows.astype(np.int64)).to(logits.device)]
        for number in range(growing.longest):
            self._draw(logits, growing, number, scored=scored)
            if number + 1 == growing.longest:
                return
            handle, before = self._steps[number]
            plan, tokens = growing.step(number + 1, before), growing.tokens[:, number].clamp(min=0)
            made = self._recorder.run(handle, plan, None, hidden, tokens.int())
            logits, hidden = made["logits"], made["hidden"].clone()  # its own next input

    def _draw_given(self, made: dict[str, Tensor], growing: Growing, *, scored: bool) -> bool:
        """From rows that are there; True where scores are logits of a confidence."""
        given, sure = made["logits"].clone(), made.get("confidence")
        sure = None if sure is None else sure.clone()
        starts = np.fromiter(accumulate(growing.depths.tolist(), initial=0), np.int64)[:-1]
        for number in range(growing.longest):
            at = torch.from_numpy(np.where(growing.depths > number, starts + number, starts)).to(given.device)
            logits, confidence = given[at], None if sure is None else sure[at, 0]
            if self._steps:
                handle, before = self._steps[0]
                tokens = growing.tokens[:, number - 1].clamp(min=0).int() if number else None
                found = self._recorder.run(handle, growing.step(number, before), None, logits, tokens)
                logits = found["logits"]
                if confidence is not None and "confidence" in found:
                    confidence = confidence + found["confidence"][:, 0]
            self._draw(logits, growing, number, scored=scored and sure is None)
            if confidence is not None:
                growing.scores[:, number] = confidence
        return sure is not None

    def _draw(self, logits: Tensor, growing: Growing, number: int, *, scored: bool) -> None:
        if self._token_ids is None:
            logits = logits[:, : self._vocab_size]
        self._sampler.draw(logits, growing.drawing, self._token_ids, growing.tokens, number)
        if scored:
            drawn = growing.tokens[:, number]
            growing.scores[:, number] = self._sampler.logprobs(logits, drawn, self._token_ids)


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
