"""Prompt lookup: the tokens that followed the same n-gram earlier, in this sequence (Saxena 2023; no model needed) or
in what other requests of the same owner were answered."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Self

from headstart.core import Draft, Sequence
from headstart.drafters.base import Drafter, Target, Wish
from headstart.drafters.recent import LONGEST as LONGEST_SHARED, RecentTexts

LONGEST = 16
"""Longer matches in the sequence itself say no more."""
SHARED = "shared"
"""Method of drafts from other requests' texts: how often they are right is learned apart."""


@dataclass
class _Index:
    """Per n, the position after the latest occurrence of each n-gram that ends before the last token."""

    num_indexed: int = 0
    after: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter(Drafter):
    """Longest match first, latest occurrence wins; the index grows with the sequence. `recent`: texts of others."""

    method = "ngram"

    def __init__(self, smallest: int, largest: int, recent: RecentTexts | None = None) -> None:
        self._sizes, self._recent = range(smallest, largest + 1), recent
        self._indexes: dict[Sequence, _Index] = {}

    @classmethod
    def attach(cls, target: Target) -> Self:
        return cls(*target.ngram, RecentTexts() if target.shared_lookup else None)

    def propose(self, wishes: Seq[Wish]) -> None:
        for wish in wishes:
            sequence, tokens = wish.sequence, wish.sequence.tokens
            start, size = self._find(sequence)
            matched = _matched(tokens, start, size) if size else 0
            if self._recent and matched < LONGEST:
                found, longer = self._recent.find(_owner(sequence), tokens, wish.depth)
                if longer > matched:
                    sequence.draft = Draft(found, method=SHARED, scores=[longer / LONGEST_SHARED] * len(found))
                    continue
            if size:
                following = tokens[start : start + wish.depth]
                # longer matches are right more often; how often is for others to learn
                sequence.draft = Draft(following, method=self.method, scores=[matched / LONGEST] * len(following))

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
        if self._recent and sequence.num_output and sequence.finish_reason != "error":
            prompt, tokens = sequence.num_prompt, sequence.tokens
            self._recent.add(_owner(sequence), tokens[:prompt], tokens[prompt:])

    def forget(self) -> None:
        if self._recent:
            self._recent.forget()


def _owner(sequence: Sequence) -> int:
    """Texts are shared within an API key and a cache salt. Python's hash of strings has a secret of the process."""
    return hash((sequence.request.owner, sequence.request.cache_salt))


def _matched(tokens: Seq[int], start: int, size: int) -> int:
    """How many tokens before `start` are those at the end of the text; at least `size` are."""
    while size < LONGEST and size < start and tokens[start - 1 - size] == tokens[-1 - size]:
        size += 1
    return size


DRAFTER = NgramDrafter
