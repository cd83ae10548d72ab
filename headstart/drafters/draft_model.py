"""A second whole model drafts token by token, one pass for each; its keys lie under the same block table.

A round first makes up for all tokens since the last one; the row of the newest gives the first draft token. The keys of
drafted tokens that turn out right stay: those of a whole model depend on tokens alone.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Self

from headstart.core import Rows, Sequence
from headstart.drafters.base import Drafter, Round, Target, Wish
from headstart.errors import UsageError
from headstart.heads.draft_model import DraftModel
from headstart.kernels.ops import Buffer
from headstart.layers.network import FORWARD, DecoderNetwork


@dataclass
class _Guessed:
    """Tokens whose keys were computed behind the true ones; `table` is replaced when the sequence is preempted, and the
    keys are then lost."""

    start: int
    tokens: list[int]
    table: array[int]


class DraftModelDrafter(Drafter):
    """Needs nothing of the trunk but its tokens."""

    method = "draft_model"

    def __init__(self, target: Target, model: DraftModel) -> None:
        self._runner, self._budget, self._model = target.runner, target.token_budget, model
        ids = model.draft_token_ids
        self._token_ids = None if ids is None else target.backend.index(ids)
        self._network = target.runner.open(DecoderNetwork(model.decoder))
        self._guessed: dict[Sequence, _Guessed] = {}

    @classmethod
    def attach(cls, target: Target) -> Self:
        if not isinstance(target.head, DraftModel):
            raise UsageError("drafter draft_model needs a second, smaller model", "name it: --head MODEL")
        return cls(target, target.head)

    def missed(self, sequence: Sequence) -> int:
        self._keep_right(sequence)
        return max(len(sequence.tokens) - 1 - self._runner.filled(self._network, sequence), 0)

    def _keep_right(self, sequence: Sequence) -> None:
        """Keys of guesses that came true are those of true tokens."""
        guessed = self._guessed.pop(sequence, None)
        if guessed is None or guessed.table is not sequence.block_table:
            return
        right = 0
        for guess, token in zip(guessed.tokens, sequence.tokens[guessed.start :], strict=False):
            if guess != token:
                break
            right += 1
        if right:
            self._runner.fill(self._network, [Rows(sequence, guessed.start, guessed.tokens[:right], 0)])

    def propose(self, wishes: Seq[Wish]) -> None:
        asked = [wish for wish in wishes if wish.starts and self._has_room(wish)]
        if not asked:
            return
        parts = [self._true_rows(wish.sequence) for wish in asked]
        logits = self._pass(parts)
        self._runner.fill(self._network, parts)
        growing = [Round.of(wish, self.method) for wish in asked]
        while growing := self._draw(logits, growing):
            parts = []
            for each in growing:
                sequence, drafted = each.sequence, each.draft.tokens
                parts.append(Rows(sequence, len(sequence.tokens) + len(drafted) - 1, drafted[-1:], 1))
            logits = self._pass(parts)
        for sequence in [wish.sequence for wish in asked]:
            if guesses := sequence.draft.tokens[:-1]:
                self._guessed[sequence] = _Guessed(len(sequence.tokens), guesses, sequence.block_table)

    def _has_room(self, wish: Wish) -> bool:
        return len(wish.sequence.tokens) + wish.depth <= self._model.max_length

    def _true_rows(self, sequence: Sequence) -> Rows:
        """What the network has not seen, up to the newest token; all but the last budget of it is computed here."""
        tokens = sequence.tokens
        while self.missed(sequence) >= self._budget:
            start = self._runner.filled(self._network, sequence)
            part = Rows(sequence, start, tokens[start : start + self._budget], 0)
            self._pass([part])
            self._runner.fill(self._network, [part])
        start = len(tokens) - 1 - self.missed(sequence)
        return Rows(sequence, start, tokens[start:], 1)

    def _pass(self, parts: Seq[Rows]) -> Buffer:
        """One pass over rows of the trunk's tokens; logits of those that want any."""
        if (fed := self._model.fed) is not None:
            parts = [Rows(part.sequence, part.start, fed[part.token_ids].tolist(), part.num_logits) for part in parts]
        return self._runner.run(self._network, FORWARD, parts)["logits"]

    def _draw(self, logits: Buffer, rounds: Seq[Round]) -> list[Round]:
        """One more token for each, by the trunk's own sampling pipeline and noise; those that want yet another."""
        scored = any(each.gate is not None for each in rounds)
        sampled = self._runner.draw(logits, [each.entry for each in rounds], self._token_ids, scored=scored)
        for row, each in enumerate(rounds):
            each.take(sampled, row)
        return [each for each in rounds if each.wants_more]

    def release(self, sequence: Sequence) -> None:
        self._guessed.pop(sequence, None)


DRAFTER = DraftModelDrafter
