"""Drafts of a model with another tokenizer: its text is tokenized again with the trunk's tokenizer.

The draft model reads the text of the sequence in its own tokens and continues it greedily. The end of the trunk's text
and the drafted text are then encoded together; the tokens after the trunk's own are the draft (universal assisted
generation, transformers `AssistedCandidateGeneratorDifferentTokenizers`). The draft model has an engine of its own,
since its tokens do not lie at the trunk's positions.
"""

from collections.abc import Sequence as Seq

from headstart.core import Draft
from headstart.drafters.base import Drafter, DraftRequest, TargetModel, TextCompleter
from headstart.heads.draft_model import DraftModel

OVERLAP = 8  # last tokens of the trunk that are encoded again together with the draft
WHOLE = 3  # further tokens before them, if they begin inside a character
STEP = 512  # a text longer than the draft model's context loses its first tokens in such steps


class RetokenizingDrafter(Drafter):
    """Drafts with a whole model that has another tokenizer."""

    method = "draft_model"
    costs_per = "pass"

    def __init__(self, target: TargetModel, model: DraftModel, texts: TextCompleter) -> None:
        assert model.tokenizers
        self._texts, (self._trunk, self._own) = texts, model.tokenizers
        self._vocab_size, self._max_length = target.config.vocab_size, model.max_length

    def propose(self, requests: Seq[DraftRequest]) -> None:
        found: list[tuple[DraftRequest, int, list[int]]] = []
        for request in requests:
            depth = request.pass_depth
            if request.should_start and depth > 0 and (own := self._own_tokens(request.sequence.tokens, depth)):
                found.append((request, depth, own))
        counts = [_own_count(depth) for _, depth, _ in found]
        for (request, depth, _), drafted in zip(found, self._texts([own for *_, own in found], counts), strict=True):
            tokens = self._trunk_tokens(request.sequence.tokens, drafted)
            request.sequence.draft = Draft(tokens=tokens[:depth], method=self.method)

    def _own_tokens(self, tokens: Seq[int], depth: int) -> list[int]:
        """The text of trunk tokens in the draft model's tokens; empty if it ends inside a character or is too long."""
        max_tokens = self._max_length - _own_count(depth) - 1
        start = -(-max(len(tokens) - max_tokens, 0) // STEP) * STEP
        text = self._text(tokens[start:])
        own = self._own.encode(text) if text else []
        while len(own) > max_tokens:
            start += STEP
            own = self._own.encode(self._text(tokens[start:]) or "") if start < len(tokens) else []
        return own

    def _text(self, tokens: Seq[int]) -> str | None:
        """The text of trunk tokens; None if it begins or ends inside a character."""
        try:
            return b"".join(map(self._trunk.token_bytes, tokens)).decode()
        except UnicodeDecodeError:
            return None

    def _trunk_tokens(self, tokens: Seq[int], drafted: Seq[int]) -> list[int]:
        """The draft model's tokens as trunk tokens that follow `tokens`."""
        end = next((i for i, token in enumerate(drafted) if token in self._own.special_ids), len(drafted))
        new = b"".join(map(self._own.token_bytes, drafted[:end])).decode(errors="ignore")
        if not new:
            return []
        for overlap in range(OVERLAP, OVERLAP + WHOLE + 1):
            if (last := self._text(tokens[-overlap:])) is not None:
                break
        else:
            return []
        ids = self._trunk.encode(last + new)
        size, length = 0, len(last.encode())
        for i, token in enumerate(ids):
            if size >= length:
                break
            data = self._trunk.token_bytes(token)
            size += len(data if i else self._trunk.strip_start(data))
        else:
            i = len(ids)
        if size != length:  # a token lies on both sides
            i, ids = 0, self._trunk.encode(new, parse_special=False)
        return [token for token in ids[i:] if token < self._vocab_size]


def _own_count(depth: int) -> int:
    """Number of tokens that the draft model generates for `depth` trunk tokens, which may be longer than its own."""
    return depth + max(depth // 2, 1)
