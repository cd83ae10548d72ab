"""A second, smaller model drafts, one pass per token, or a PARD model in one; it uses the trunk's block tables.

Each draft first computes all tokens committed since the last draft; the newest token's row gives the first draft token.
KV of drafted tokens that are accepted stays valid, because a whole model's KV depends on tokens only. A model with
another tokenizer drafts in an engine of its own (_retokenized.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from headstart.core import Rows, Sequence
from headstart.drafters._retokenized import RetokenizingDrafter
from headstart.drafters.base import Drafter, DraftRequest, GrowingDraft, TargetModel, draw_next
from headstart.drafters.block import BlockDrafter
from headstart.errors import UsageError
from headstart.heads.draft_model import DraftModel
from headstart.kernels.ops import Buffer
from headstart.layers.network import FORWARD, DecoderNetwork


@dataclass
class _Unverified:
    """Drafted tokens whose KV has been computed and that are not verified yet."""

    start: int  # position of the first token
    tokens: list[int]
    table: array[int]  # the sequence's block table; preemption replaces it, and the KV is lost


class DraftModelDrafter(Drafter):
    """Drafts with a whole model; uses only the trunk's tokens."""

    method = "draft_model"

    def __init__(self, target: TargetModel, model: DraftModel) -> None:
        self._runner, self._budget, self._model = target.runner, target.token_budget, model
        ids = model.draft_token_ids
        self._token_ids = None if ids is None else target.backend.index(ids)
        self._network = target.runner.open(DecoderNetwork(model.decoder))
        self._unverified: dict[Sequence, _Unverified] = {}

    @classmethod
    def attach(cls, target: TargetModel) -> Drafter:
        if not isinstance(target.head, DraftModel):
            raise UsageError("drafter draft_model needs a second, smaller model", "name it: --head MODEL")
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
        eligible = [request for request in requests if request.should_start and self._has_room(request)]
        if not eligible:
            return
        parts = [self._committed_rows(request.sequence) for request in eligible]
        logits = self._pass(parts)
        self._runner.fill(self._network, parts)
        growing = [GrowingDraft.start(request, self.method) for request in eligible]
        while growing := draw_next(self._runner, logits, growing, self._token_ids):
            parts = []
            for each in growing:
                sequence, drafted = each.sequence, each.draft.tokens
                parts.append(Rows(sequence, len(sequence.tokens) + len(drafted) - 1, drafted[-1:], 1))
            logits = self._pass(parts)
        for sequence in [request.sequence for request in eligible]:
            if guesses := sequence.draft.tokens[:-1]:
                self._unverified[sequence] = _Unverified(len(sequence.tokens), guesses, sequence.block_table)

    def _has_room(self, request: DraftRequest) -> bool:
        return len(request.sequence.tokens) + request.depth <= self._model.max_length

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

    def __init__(self, target: TargetModel, model: DraftModel) -> None:
        network, programs = DecoderNetwork(model.decoder), (FORWARD, FORWARD)
        super().__init__(target, model, network, programs, model.draft_token_ids)
        self._model = model

    def propose(self, requests: Seq[DraftRequest]) -> None:
        longest = self._model.max_length
        super().propose([each for each in requests if len(each.sequence.tokens) + each.depth <= longest])

    def _own(self, tokens: Seq[int]) -> list[int]:
        ids = self._model.own_ids
        return list(tokens) if ids is None else ids[tokens].tolist()


DRAFTER = DraftModelDrafter
