"""Prompt lookup: the tokens that followed the same n-gram earlier in this sequence (Saxena 2023; no model needed)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Self

from headstart.config import MAX_DEPTH
from headstart.core import Draft, Sequence
from headstart.drafters._drafter import AttachedHead, Target
from headstart.layers.decoder import Tap


@dataclass
class _Index:
    """Per n, the position after the latest occurrence of each n-gram that ends before the last token."""

    num_indexed: int = 0
    after: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter:
    """Longest match first, latest occurrence wins; the index grows with the sequence."""

    method = "ngram"
    max_depth = MAX_DEPTH

    def __init__(self, smallest: int, largest: int) -> None:
        self._sizes = range(smallest, largest + 1)
        self._indexes: dict[Sequence, _Index] = {}

    @classmethod
    def attach(cls, target: Target) -> Self:
        return cls(*target.ngram)

    @classmethod
    def tap(cls, head: AttachedHead | None) -> Tap | None:
        return None

    def propose(self, wishes: Seq[tuple[Sequence, int]]) -> None:
        for sequence, depth in wishes:
            tokens = sequence.tokens
            start = self._find(sequence)
            if start is not None:
                sequence.draft = Draft(tokens[start : start + depth], method=self.method)

    def _find(self, sequence: Sequence) -> int | None:
        tokens, index = sequence.tokens, self._indexes.setdefault(sequence, _Index())
        for end in range(max(index.num_indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    index.after[tuple(tokens[end - size : end])] = end
        index.num_indexed = len(tokens)
        matches = (index.after.get(tuple(tokens[-size:])) for size in reversed(self._sizes) if size < len(tokens))
        return next((start for start in matches if start is not None), None)

    def release(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence, None)


DRAFTER = NgramDrafter
