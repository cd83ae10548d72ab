"""Drafts with a trained head (MTP, EAGLE-3, Medusa ...): token by token, from the trunk's hidden states.

The pair (h_p, t_{p+1}) is stored at position and slot p + 1 of the head's KV. Each draft first computes the pairs since
the last draft from true hidden states; the last pair's row gives the first draft token. Each further step reads the
drafted token and the output vector of the module's last row; such rows are computed again later from true hidden
states. A head without KV needs only the newest pair.

In a chain (HeadSpec.chained) module i > 0 runs over the same pairs, on the outputs of module i - 1 and the tokens i
positions further on. The newest pairs read drafted tokens there, and are computed again in the next draft.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate
from typing import Self, cast

import numpy as np
from numpy.typing import NDArray

from headstart.core import Rows, Sequence
from headstart.drafters import base
from headstart.heads.base import Head, HeadNetwork
from headstart.kernels.draft_loop import PendingSample
from headstart.kernels.ops import Buffer, Weight
from headstart.layers.build import raw_lm_head
from headstart.layers.linear import Linear, LMHead

MAX_EARLY_PAIRS = 4
"""Most uncached pairs for an early draft. More pairs mean a prompt or a long pause, where an early start gains
little."""


class HeadDrafter(base.Drafter):
    """Drafts with a head of any number of modules; step i runs module `spec.module_of(i)`. Method: the head's kind."""

    takes_vocabulary = True

    def __init__(self, target: base.TargetModel, head: Head) -> None:
        self._backend, self._runner, self._budget = target.backend, target.runner, target.token_budget
        self.method, self._spec = head.spec.kind, head.spec
        ids, embedding, lm_heads = vocabulary_parts(target, head)
        self.max_depth, self.tap = head.spec.depth_limit, head.spec.tap
        self._token_ids = None if ids is None else target.backend.index(ids)
        network = HeadNetwork(head, target.config.hidden_size, embedding, lm_heads)
        self._network = target.runner.open(network, target.network)
        self._budget = max(self._budget, network.num_recomputed + 1)
        self._modules_with_kv = [i for i, module in enumerate(head.modules) if module.kv_specs]
        reading = [0] if head.spec.is_chain else sorted({0, *self._modules_with_kv})  # modules that read the trunk
        self._pair_programs = [f"pairs.{i}" for i in reading]
        others = [(f"next.{self._spec.module_of(i)}", self._spec.rows_before(i)) for i in range(1, self.max_depth)]
        self._steps = base.DraftPrograms(self._network, self._pair_programs[0], others, self._token_ids)

    @classmethod
    def attach(cls, target: base.TargetModel) -> Self:
        if target.head is None:
            raise base.no_head()
        return cls(target, target.head)

    def num_uncached(self, sequence: Sequence) -> int:
        if not self._modules_with_kv:
            return 0
        return len(sequence.tokens) - 1 - self._runner.filled(self._network, sequence)

    def propose(self, requests: Seq[base.DraftRequest]) -> None:
        requests = [request for request in requests if request.should_start]
        if not requests:
            return
        parts = self._catch_up(requests)
        if self._spec.is_chain:
            self._run_chain(parts, [base.GrowingDraft.start(request, self.method) for request in requests])
        elif left := self._runner.draft(self._steps, requests, parts, self.method):
            self._draft([requests[i] for i in left], [parts[i] for i in left])
        self._mark_filled(parts)

    def propose_early(self, requests: Seq[base.EarlyDraftRequest], sample: PendingSample) -> None:
        """Rows as of `_pairs`, as if all drafted tokens were accepted. Only for heads whose pairs take one pass."""
        if len(self._pair_programs) > 1 or self._spec.is_chain:
            return
        parts: list[Rows] = []
        eligible: list[base.EarlyDraftRequest] = []
        for request in requests:
            tokens = request.sequence.tokens
            known = self._runner.filled(self._network, request.sequence)
            start = min(known, len(tokens)) if self._modules_with_kv else len(tokens)
            if len(tokens) - start <= MAX_EARLY_PAIRS:
                ids = [*tokens[start:], *request.sequence.draft.tokens, 0]
                parts.append(Rows(request.sequence, start, ids, 1))
                eligible.append(request)
        if eligible:
            self._runner.draft_early(self._steps, eligible, parts, sample)

    def _draft(self, requests: Seq[base.DraftRequest], parts: Seq[Rows]) -> None:
        """One pass per draft step (see DraftPrograms) for requests that the backend cannot draft in one call."""
        output = self._runner.run(self._network, self._steps.first, parts)
        ends = accumulate([len(part.token_ids) for part in parts])
        pairs = zip(requests, ends, strict=True)
        growing = [base.GrowingDraft.start(request, self.method, end - 1) for request, end in pairs]
        self._draw_next(output["logits"], growing)
        self._continue(growing, output["hidden"])

    def _draw_next(self, logits: Buffer, growing: Seq[base.GrowingDraft]) -> None:
        """Samples and appends the next token of each of n drafts by logits [n, V']."""
        scored = any(each.gate is not None for each in growing)
        sampled = self._runner.draw(logits, [each.entry for each in growing], self._token_ids, scored=scored)
        for row, each in enumerate(growing):
            each.append(sampled, row)

    def _continue(self, growing: list[base.GrowingDraft], hidden: Buffer) -> None:
        """Runs the draft steps after the first. Each draft has one token; its `row` is that of its last pair in
        `hidden` [R, H], the output vectors of the first step."""
        step = 1
        while growing := [each for each in growing if each.can_grow]:
            hidden = self._next_step(step, growing, hidden)
            step += 1

    def _catch_up(self, requests: Seq[base.DraftRequest]) -> list[Rows]:
        """Computes the uncached pairs; returns each request's last rows, within the token budget, which have yet to run
        through the first module."""
        for sequence in [request.sequence for request in requests]:
            while self.num_uncached(sequence) >= self._budget:
                chunk = [self._pairs(sequence, self._budget)]
                if self._spec.is_chain:
                    self._run_chain(chunk, [])
                else:
                    for program in self._pair_programs:
                        self._runner.run(self._network, program, chunk)
                self._mark_filled(chunk)
        parts = [self._pairs(request.sequence) for request in requests]
        for program in self._pair_programs[1:]:
            self._runner.run(self._network, program, parts)
        return parts

    def _run_chain(self, parts: Seq[Rows], growing: Seq[base.GrowingDraft]) -> None:
        """Runs a chain over pairs: each module reads the tokens one position further on, at the end drafted ones, or
        token 0 after the end of a draft. `growing`: the drafts of `parts`, if any."""
        # All modules run, however short the drafts: each stores its keys and values of these pairs, which later drafts
        # attend to. Hidden states are not kept, so a module that is left out cannot make up for it alone.
        hidden: Buffer = None
        all_rows = np.arange(sum(len(part.token_ids) for part in parts), dtype=np.int32)
        for module in range(self._spec.num_modules):
            live = [each for each in growing if each.can_grow]
            drawn = {each.sequence for each in live}
            rows = [
                replace(part, token_ids=_tokens_ahead(part, module), num_logits=int(part.sequence in drawn))
                for part in parts
            ]
            output = self._runner.run(self._network, f"{'next' if module else 'pairs'}.{module}", rows, hidden=hidden)
            if live:
                self._draw_next(output["logits"], live)
            # a copy: a pass must not read the buffer it writes
            hidden = self._backend.rows(output["hidden"], all_rows)

    def _pairs(self, sequence: Sequence, limit: int | None = None) -> Rows:
        # at least one row is recomputed, because the first draft token is drawn from it
        start = len(sequence.tokens) - 1 - max(self.num_uncached(sequence), 0)
        end = len(sequence.tokens) if limit is None else min(start + limit, len(sequence.tokens))
        return Rows(sequence, start, sequence.tokens[start:end], 1 if limit is None else 0)

    def _mark_filled(self, parts: Seq[Rows]) -> None:
        if self._modules_with_kv:
            self._runner.fill(self._network, parts)

    def _next_step(self, step: int, growing: list[base.GrowingDraft], hidden: Buffer) -> Buffer:
        """Appends a token to each draft, from its last token and recycled vector; returns the new vectors [n, H]."""
        module = cast(int, self._spec.module_of(step))
        before = self._spec.rows_before(step)
        parts = [Rows(each.sequence, len(each.sequence.tokens) + before, each.draft.tokens[-1:], 1) for each in growing]
        # a copy, also of all rows: a pass must not read the buffer it writes
        recycled = self._backend.rows(hidden, np.array([each.row for each in growing], np.int32))
        output = self._runner.run(self._network, f"next.{module}", parts, hidden=recycled)
        for row, each in enumerate(growing):
            each.row = row
        self._draw_next(output["logits"], growing)
        return output["hidden"]


def _tokens_ahead(part: Rows, ahead: int) -> list[int]:
    """The tokens `ahead` positions after those of a sequence's rows, drafted ones included; 0: unknown."""
    count, sequence = len(part.token_ids), part.sequence
    known = [*sequence.tokens[part.start + ahead : part.start + ahead + count]]
    known += sequence.draft.tokens[max(part.start + ahead - len(sequence.tokens), 0) :][: count - len(known)]
    return known + [0] * (count - len(known))


def vocabulary_parts(target: base.TargetModel, head: Head) -> tuple[NDArray[np.int64] | None, Weight, Seq[LMHead]]:
    """(ascending target ids that the head drafts, None: all; its embedding; an LM head for each module, or one for
    all)."""
    embedding = target.model.embedding if head.embedding is None else head.embedding
    if head.lm_heads:
        return head.draft_token_ids, embedding, head.lm_heads
    ids, sketch = head.draft_token_ids, None
    if ids is None:
        ids, sketch = target.vocabulary.token_ids, target.vocabulary.sketch
    return ids, embedding, (sketch or _lm_head(target, head, ids),)


def _lm_head(target: base.TargetModel, head: Head, token_ids: NDArray[np.int64] | None) -> Linear:
    """The head's own LM head, else the trunk's; only the rows of `token_ids` (ascending target ids) if given."""
    if head.lm_head is not None and (token_ids is None or head.draft_token_ids is not None):
        return head.lm_head
    if token_ids is None:
        return target.model.lm_head
    rows = raw_lm_head(target.weights, target.config) if head.lm_rows is None else head.lm_rows
    return Linear(target.backend.weight(rows.take_rows(token_ids), drafts=True))


DRAFTER = HeadDrafter
