"""Prompt lookup: the tokens that followed the same n-gram earlier in this sequence (Saxena 2023; no model needed)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Self

from headstart.core import Draft, Sequence
from headstart.drafters.base import Drafter, Target, Wish

LONGEST = 16
"""Longer matches say no more."""


@dataclass
class _Index:
    """Per n, the position after the latest occurrence of each n-gram that ends before the last token."""

    num_indexed: int = 0
    after: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter(Drafter):
    """Longest match first, latest occurrence wins; the index grows with the sequence."""

    method = "ngram"

    def __init__(self, smallest: int, largest: int) -> None:
        self._sizes = range(smallest, largest + 1)
        self._indexes: dict[Sequence, _Index] = {}

    @classmethod
    def attach(cls, target: Target) -> Self:
        return cls(*target.ngram)

    def propose(self, wishes: Seq[Wish]) -> None:
        for wish in wishes:
            tokens = wish.sequence.tokens
            start, size = self._find(wish.sequence)
            if size:
                following = tokens[start : start + wish.depth]
                # longer matches are right more often; how often is for others to learn
                score = min(_matched(tokens, start, size), LONGEST) / LONGEST
                wish.sequence.draft = Draft(following, method=self.method, scores=[score] * len(following))

    def _find(self, sequence: Sequence) -> tuple[int, int]:
        """Where the continuation of the longest match begins, and the length of the match; 0 if there is none."""
        tokens, index = sequence.tokens, self._indexes.setdefault(sequence, _Index())
        for end in range(max(index.num_indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    index.after[tuple(tokens[end - size : end])] = end
        index.num_indexed = len(tokens)
        for size in reversed(self._sizes):
            if size < len(tokens) and (start := index.after.get(tuple(tokens[-size:]))) is not None:
                return start, size
        return 0, 0

    def release(self, sequence: Sequence) -> None:
        self._indexes.pop(sequence, None)


def _matched(tokens: Seq[int], start: int, size: int) -> int:
    """How many tokens before `start` are those at the end of the text; at least `size` are."""
    while size < LONGEST and size < start and tokens[start - 1 - size] == tokens[-1 - size]:
        size += 1
    return size


DRAFTER = NgramDrafter
