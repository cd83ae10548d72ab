"""Hidden states by the native forward: those of run time to the bit, several times as fast as torch on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence as Seq
from dataclasses import replace

import numpy as np
import torch

from headstart.cache.recurrent import states_from_zero
from headstart.core import Request, Rows, SamplingParams, Sequence, StepPlan
from headstart.engine.load import Model
from headstart.engine.plan import build_plan
from headstart.train.data import MAX_TOKENS, Example
from headstart.train.features import Features

PASS_TOKENS = 512
"""Rows of a pass, unless one example is longer: their logits over the whole vocabulary exist at the same time."""
BLOCK_SIZE = 16


class NativeTrunk:
    """A model on the native backend with room for one pass."""

    def __init__(self, model: Model, tap: tuple[int, ...]) -> None:
        self._backend, self._tap = model.backend, tap
        slots = 2 * max(PASS_TOKENS, MAX_TOKENS)
        decoder = model.decoder
        pools = [self._backend.kv_pool(slots, spec) for spec in decoder.kv_specs]
        states = [self._backend.state_pool(0, 0, 0, spec) for spec in decoder.state_specs]
        self._handle = self._backend.prepare(decoder.program(pools, None, tap or "post_norm", states))

    def features(self, examples: Seq[Example]) -> Iterator[Features]:
        """Of each example, in order."""
        part: list[Example] = []
        for example in examples:
            if part and sum(map(len, part)) + len(example) > PASS_TOKENS:
                yield from self._pass(part)
                part = []
            part.append(example)
        if part:
            yield from self._pass(part)

    def _pass(self, examples: list[Example]) -> Iterator[Features]:
        plan = plan_of(examples)
        output = self._backend.run(self._handle, plan)
        states = [output[name] for name in (("tapped", "hidden") if self._tap else ("hidden",))]
        hidden = torch.from_numpy(np.concatenate(states, axis=1)).to(torch.bfloat16)
        best = np.full(plan.num_rows, -1)
        if len(plan.logit_rows):
            best[plan.logit_rows] = output["logits"].argmax(-1)
        for first, last in zip(plan.row_starts, plan.row_starts[1:], strict=False):
            yield Features(hidden[first:last], torch.from_numpy(best[first:last]))


def plan_of(examples: Seq[Example]) -> StepPlan:
    """One pass over whole sequences, each in blocks of its own; logits where loss needs the trunk's choice."""
    parts: list[Rows] = []
    first_block = 0
    for example in examples:
        tokens = example.tokens.tolist()
        request = Request(
            request_id="", prompt_ids=tuple(tokens), params=SamplingParams(), seed=0, stop_ids=frozenset()
        )
        sequence = Sequence(request, 0, tokens, 0)
        last_block = first_block + -(-len(tokens) // BLOCK_SIZE)
        sequence.block_table.extend(range(first_block, last_block))
        parts.append(Rows(sequence, 0, tokens, 0))
        first_block = last_block
    wanted = np.flatnonzero(np.concatenate([example.loss for example in examples]))
    plan = build_plan(parts, BLOCK_SIZE)
    return replace(plan, logit_rows=wanted.astype(np.int32), states=states_from_zero(np.diff(plan.row_starts)))
