"""A head of the checkpoint's own, or a trained one: drafts from the trunk's hidden states, one token after the other.

The pair (h_p, t_{p+1}) lives at position and slot p + 1 of the head's KV. A round first makes up for all pairs since
the last one, from true hidden states; its last row gives the first draft token. Each further step feeds the drafted
token and the recycled vector behind the last row of its module; those rows are made again from true hidden states
later. A head without KV keeps nothing between rounds: the newest row is all it needs.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from headstart.core import Rows, Sequence
from headstart.drafters.base import Drafter, Hope, Round, Steps, Target, Wish
from headstart.errors import UsageError
from headstart.heads.base import Head, HeadNetwork
from headstart.kernels.chain import Drawn
from headstart.kernels.ops import Buffer
from headstart.layers.build import lm_head_name
from headstart.layers.linear import Linear

MOST_MISSED = 4
"""Pairs that a draft begun early makes up for: whoever has more has just read a prompt, or has not drafted for long."""


class HeadDrafter(Drafter):
    """Any number of modules; step i runs module `spec.module_of(i)`. The method is the head's kind."""

    def __init__(self, target: Target, head: Head) -> None:
        self._backend, self._runner, self._budget = target.backend, target.runner, target.token_budget
        self.method, self._spec, ids = head.spec.kind, head.spec, head.draft_token_ids
        sketch = None
        if ids is None and not head.lm_heads:
            ids, sketch = target.vocabulary.token_ids, target.vocabulary.sketch
        self.max_depth, self.tap = head.spec.depth_limit, head.spec.tap
        self._token_ids = None if ids is None else target.backend.index(ids)
        embedding = target.model.embedding if head.embedding is None else head.embedding
        lm_heads = head.lm_heads or (sketch or lm_head_of(target, head, ids),)
        self._network = target.runner.open(HeadNetwork(head, target.config.hidden_size, embedding, lm_heads))
        self._keeps = [i for i, module in enumerate(head.modules) if module.kv_specs]
        self._fills = [f"pairs.{i}" for i in sorted({0, *self._keeps})]
        others = [(f"next.{self._spec.module_of(i)}", self._spec.rows_before(i)) for i in range(1, self.max_depth)]
        self._steps = Steps(self._network, self._fills[0], others, self._token_ids)

    @classmethod
    def attach(cls, target: Target) -> Self:
        if target.head is None:
            raise UsageError("the model has no head", "attach one with --head DIR, or use --drafter ngram")
        return cls(target, target.head)

    def missed(self, sequence: Sequence) -> int:
        if not self._keeps:
            return 0
        return len(sequence.tokens) - 1 - self._runner.filled(self._network, sequence)

    def propose(self, wishes: Seq[Wish]) -> None:
        wishes = [wish for wish in wishes if wish.starts]
        if not wishes:
            return
        parts = self._catch_up(wishes)
        if left := self._runner.draft(self._steps, wishes, parts, self.method):
            self._draft([wishes[i] for i in left], [parts[i] for i in left])
        self._filled(parts)

    def begin(self, hopes: Seq[Hope], drawn: Drawn) -> None:
        """The pairs of `_pairs`, if all drafted tokens are right. Modules whose pairs take a pass of their own wait."""
        if len(self._fills) > 1:
            return
        parts: list[Rows] = []
        able: list[Hope] = []
        for hope in hopes:
            tokens = hope.sequence.tokens
            start = min(self._runner.filled(self._network, hope.sequence), len(tokens)) if self._keeps else len(tokens)
            if len(tokens) - start <= MOST_MISSED:
                ids = [*tokens[start:], *hope.sequence.draft.tokens, 0]
                parts.append(Rows(hope.sequence, start, ids, 1))
                able.append(hope)
        if able:
            self._runner.begin(self._steps, able, parts, drawn)

    def _draft(self, wishes: Seq[Wish], parts: Seq[Rows]) -> None:
        """One pass for each step: what `Steps` says, for those that a backend has not drafted by itself."""
        output = self._runner.run(self._network, self._steps.first, parts)
        ends = accumulate([len(part.token_ids) for part in parts])
        rounds = [Round.of(wish, self.method, end - 1) for wish, end in zip(wishes, ends, strict=True)]
        self._draw(output["logits"], rounds)
        hidden, step = output["hidden"], 1
        while rounds := [each for each in rounds if each.wants_more]:
            hidden = self._next_step(step, rounds, hidden)
            step += 1

    def _catch_up(self, wishes: Seq[Wish]) -> list[Rows]:
        """All true pairs since the last round but those of the returned rows, which are within the token budget and
        still to go through the first module."""
        for sequence in [wish.sequence for wish in wishes]:
            while self.missed(sequence) >= self._budget:
                chunk = [self._pairs(sequence, self._budget)]
                for program in self._fills:
                    self._runner.run(self._network, program, chunk)
                self._filled(chunk)
        parts = [self._pairs(wish.sequence) for wish in wishes]
        for program in self._fills[1:]:
            self._runner.run(self._network, program, parts)
        return parts

    def _pairs(self, sequence: Sequence, limit: int | None = None) -> Rows:
        # one row is always remade, so that a fully caught-up sequence still has a row to draw from
        start = len(sequence.tokens) - 1 - max(self.missed(sequence), 0)
        end = len(sequence.tokens) if limit is None else min(start + limit, len(sequence.tokens))
        return Rows(sequence, start, sequence.tokens[start:end], 1 if limit is None else 0)

    def _filled(self, parts: Seq[Rows]) -> None:
        if self._keeps:
            self._runner.fill(self._network, parts)

    def _next_step(self, step: int, rounds: list[Round], hidden: Buffer) -> Buffer:
        """One more token for each round, from its last drafted token and recycled vector."""
        module = cast(int, self._spec.module_of(step))
        before = self._spec.rows_before(step)
        parts = [Rows(r.sequence, len(r.sequence.tokens) + before, r.draft.tokens[-1:], 1) for r in rounds]
        # a copy even where all rows are taken: the results of a pass are not its own next input
        recycled = self._backend.rows(hidden, np.array([r.row for r in rounds], np.int32))
        output = self._runner.run(self._network, f"next.{module}", parts, hidden=recycled)
        for row, each in enumerate(rounds):
            each.row = row
        self._draw(output["logits"], rounds)
        return output["hidden"]

    def _draw(self, logits: Buffer, rounds: list[Round]) -> None:
        """The trunk's own sampling pipeline and noise, on the head's logits (coupled sampling)."""
        scored = bool([r for r in rounds if r.gate is not None])
        sampled = self._runner.draw(logits, [r.entry for r in rounds], self._token_ids, scored=scored)
        for row, each in enumerate(rounds):
            each.take(sampled, row)


def lm_head_of(target: Target, head: Head, token_ids: NDArray[np.int64] | None) -> Linear:
    """The head's own LM head, or the trunk's; of a full one only the rows of the draft vocabulary (ascending target
    ids)."""
    weights, config = target.weights, target.config
    if head.lm_head is not None and (token_ids is None or head.draft_token_ids is not None):
        return head.lm_head
    if token_ids is None:
        return target.model.lm_head
    rows = head.lm_rows
    if rows is None:
        rows = weights.raw(lm_head_name(weights, config), (config.vocab_size, config.hidden_size))
    return Linear(target.backend.weight(rows.take_rows(token_ids), drafts=True))


DRAFTER = HeadDrafter
