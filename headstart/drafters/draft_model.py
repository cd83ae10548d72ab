"""A second, smaller model drafts, token by token, or a PARD model in one pass; it uses the trunk's block tables.

Each draft first computes all tokens committed since the last draft; the newest token's row gives the first draft token.
KV of drafted tokens that are accepted stays valid, because a whole model's KV depends on tokens only. If the model has
a head of its own, that head guesses the next tokens of the draft, and one pass of the model verifies them (cascade
speculative drafting, arXiv 2312.11462): fewer passes, and the same draft. A model with another tokenizer drafts in an
engine of its own (_retokenized.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate

from headstart.core import Draft, Rows, Sequence, TokenCounts
from headstart.drafters._retokenized import RetokenizingDrafter
from headstart.drafters.base import Drafter, DraftRequest, DraftVocabulary, GrowingDraft, TargetModel
from headstart.drafters.block import BlockDrafter
from headstart.drafters.head import HeadDrafter
from headstart.heads.base import Head
from headstart.heads.draft_model import DraftModel, no_draft_model
from headstart.kernels.ops import Buffer
from headstart.layers.decoder import tap_width
from headstart.layers.network import FORWARD, DecoderNetwork

MAX_GUESSES = 3
"""Tokens that a draft model's head guesses for one pass of the draft model."""


@dataclass
class _Unverified:
    """Drafted tokens whose KV has been computed and that are not verified yet."""

    start: int  # position of the first token
    tokens: list[int]
    table: array[int]  # the sequence's block table; preemption replaces it, and the KV is lost


class _GuessingHead(HeadDrafter):
    """Guesses the next tokens of drafts with the draft model's own head."""

    def __init__(self, target: TargetModel, head: Head) -> None:
        super().__init__(target, head)
        self._committed: dict[Sequence, int] = {}  # number of committed tokens of each sequence of the latest call

    def guess(self, growing: Seq[GrowingDraft], parts: Seq[Rows]) -> list[list[int]]:
        """Guesses up to MAX_GUESSES tokens after each draft, at most as many as the draft lacks.

        parts: rows of the draft model's next pass. The head reads hidden states of the rows before them. With two rows
        the token of the second one takes the place of the head's first token; with more rows nothing is guessed.
        """
        self._committed.clear()
        requests: list[list[DraftRequest]] = [[], []]  # of parts with one row, of parts with two rows
        sequences: list[Sequence] = []
        for each, part in zip(growing, parts, strict=True):
            tokens, known = [*each.sequence.tokens, *each.draft.tokens], part.token_ids[1:]
            sequence = replace(
                each.sequence, tokens=tokens[: len(tokens) - len(known)], draft=Draft(), counts=TokenCounts()
            )
            self._committed[sequence] = len(each.sequence.tokens)
            sequences.append(sequence)
            count = min(MAX_GUESSES, self.max_depth - len(known), each.depth - len(each.draft.tokens))
            can_guess = sequence.constraint is None and len(known) < 2 and len(each.draft.tokens) + 1 < self._budget
            if can_guess and count > 0:
                sequence.draft.tokens += known
                requests[len(known)].append(DraftRequest(sequence, count + len(known)))
        self.propose(requests[0])
        self._propose_after(requests[1])
        return [
            sequence.draft.tokens[len(part.token_ids) - 1 :] for sequence, part in zip(sequences, parts, strict=True)
        ]

    def _propose_after(self, requests: Seq[DraftRequest]) -> None:
        """Continues the sequences' drafts, which have their first token."""
        if not requests:
            return
        parts = self._catch_up(requests)
        hidden = self._runner.run(self._network, self._steps.first, parts)["hidden"]
        ends = accumulate([len(part.token_ids) for part in parts])
        growing = [
            GrowingDraft(request.sequence, request.depth, None, request.sequence.draft, end - 1)
            for request, end in zip(requests, ends, strict=True)
        ]
        self._continue(growing, hidden)
        self._mark_filled(parts)

    def _mark_filled(self, parts: Seq[Rows]) -> None:
        """Marks only the pairs of committed tokens; those of drafted tokens may still be rejected."""
        counts = [max(self._committed[part.sequence] - part.start, 0) for part in parts]
        pairs = zip(parts, counts, strict=True)
        super()._mark_filled([replace(part, token_ids=part.token_ids[:count]) for part, count in pairs if count])


class DraftModelDrafter(Drafter):
    """Drafts with a whole model; uses only the trunk's tokens."""

    method = "draft_model"

    def __init__(self, target: TargetModel, model: DraftModel) -> None:
        self._runner, self._budget, self._model = target.runner, target.token_budget, model
        ids = model.draft_token_ids
        self._token_ids = None if ids is None else target.backend.index(ids)
        whole, head = model.whole, model.whole.head
        tap = head.spec.tap if head else None
        width = tap_width(tap, whole.config.hidden_size, whole.config.num_streams)
        self._network = target.runner.open(DecoderNetwork(whole.decoder, tap, width))
        self._head: _GuessingHead | None = None
        if head:
            own = replace(
                target, model=whole.decoder, config=whole.config, weights=whole.weights, head=head,
                vocabulary=DraftVocabulary(), network=self._network,
            )  # fmt: skip
            self._head = _GuessingHead(own, head)
        self._unverified: dict[Sequence, _Unverified] = {}

    @classmethod
    def attach(cls, target: TargetModel) -> Drafter:
        if not isinstance(target.head, DraftModel):
            raise no_draft_model()
        if target.draft_texts is not None:
            return RetokenizingDrafter(target, target.head, target.draft_texts)
        return ParallelDraftModelDrafter(target, target.head) if target.head.spec.block else cls(target, target.head)

    def num_uncached(self, sequence: Sequence) -> int:
        self._fill_accepted(sequence)
        return max(len(sequence.tokens) - 1 - self._runner.filled(self._network, sequence), 0)

    def _fill_accepted(self, sequence: Sequence) -> None:
        """Marks the KV of accepted draft tokens as valid."""
        unverified = self._unverified.pop(sequence, None)
        if unverified is None or unverified.table is not sequence.block_table:
            return
        num_accepted = 0
        for guess, token in zip(unverified.tokens, sequence.tokens[unverified.start :], strict=False):
            if guess != token:
                break
            num_accepted += 1
        if num_accepted:
            self._runner.fill(self._network, [Rows(sequence, unverified.start, unverified.tokens[:num_accepted], 0)])

    def propose(self, requests: Seq[DraftRequest]) -> None:
        starting = (request for request in requests if request.should_start)
        eligible = [each for each in starting if len(each.sequence.tokens) + each.depth <= self._model.max_length]
        if not eligible:
            return
        growing = [GrowingDraft.start(request, self.method) for request in eligible]
        committed = parts = [self._committed_rows(request.sequence) for request in eligible]
        while growing:
            guesses = self._head.guess(growing, parts) if self._head else [[] for _ in growing]
            rows = [
                replace(part, token_ids=[*part.token_ids, *guessed], num_logits=len(guessed) + 1)
                for part, guessed in zip(parts, guesses, strict=True)
            ]
            logits = self._pass(rows)
            self._runner.fill(self._network, committed)
            self._draw(logits, growing, guesses)
            committed, growing = [], [each for each in growing if each.can_grow]
            parts = [Rows(each.sequence, each.position - 1, each.draft.tokens[-1:], 1) for each in growing]

    def _draw(self, logits: Buffer, growing: Seq[GrowingDraft], guesses: Seq[Seq[int]]) -> None:
        """Appends to each draft the tokens of its rows [L, V'], up to the first that differs from its guess."""
        entries = [
            (each.sequence, each.position + i, [*each.draft.tokens, *guessed[:i]])
            for each, guessed in zip(growing, guesses, strict=True)
            for i in range(len(guessed) + 1)
        ]
        scored = any(each.gate is not None for each in growing)
        sampled = self._runner.draw(logits, entries, self._token_ids, scored=scored)
        first = 0
        for each, guessed in zip(growing, guesses, strict=True):
            drafted, depth = each.draft.tokens, each.depth
            num_computed = len(drafted)
            for i in range(len(guessed) + 1):
                each.append(sampled, first + i)
                if len(drafted) == num_computed or drafted[-1:] != guessed[i : i + 1]:
                    break
                num_computed += 1
                each.depth = depth  # the gate cannot end the draft here: the next token is already computed
            table = each.sequence.block_table
            self._unverified[each.sequence] = _Unverified(len(each.sequence.tokens), drafted[:num_computed], table)
            first += len(guessed) + 1

    def _committed_rows(self, sequence: Sequence) -> Rows:
        """Committed rows that the draft model has not computed, at most a budget; earlier rows are computed here."""
        tokens = sequence.tokens
        while self.num_uncached(sequence) >= self._budget:
            start = self._runner.filled(self._network, sequence)
            part = Rows(sequence, start, tokens[start : start + self._budget], 0)
            self._pass([part])
            self._runner.fill(self._network, [part])
        start = len(tokens) - 1 - self.num_uncached(sequence)
        return Rows(sequence, start, tokens[start:], 1)

    def _pass(self, parts: Seq[Rows]) -> Buffer:
        """Runs one pass over rows of the trunk's tokens and returns the requested logits."""
        if (own_ids := self._model.own_ids) is not None:
            parts = [
                Rows(part.sequence, part.start, own_ids[part.token_ids].tolist(), part.num_logits) for part in parts
            ]
        return self._runner.run(self._network, FORWARD, parts)["logits"]

    def release(self, sequence: Sequence) -> None:
        self._unverified.pop(sequence, None)


class ParallelDraftModelDrafter(BlockDrafter):
    """Drafts with a PARD model, as with a block drafter."""

    takes_vocabulary = False

    def __init__(self, target: TargetModel, model: DraftModel) -> None:
        network, programs = DecoderNetwork(model.whole.decoder), (FORWARD, FORWARD)
        super().__init__(target, model, network, programs, model.draft_token_ids)
        self._model = model

    def propose(self, requests: Seq[DraftRequest]) -> None:
        max_length = self._model.max_length
        super().propose([each for each in requests if len(each.sequence.tokens) + each.depth <= max_length])

    def _network_ids(self, tokens: Seq[int]) -> list[int]:
        ids = self._model.own_ids
        return list(tokens) if ids is None else ids[tokens].tolist()


DRAFTER = DraftModelDrafter
