"""Texts that requests have put out lately: what followed the same tokens there.

A ring of tokens, oldest out, with a hash chain for each of two lengths of n-grams, as compressors have them: the long
one finds the text that a request repeats among many that begin alike, the short one finds everything else. Candidates
are compared token by token, so what is found is the longest match among the latest ones (docs/LOG.md has numbers).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

MEMORY = 64 << 20
"""Bytes of all texts that are kept."""
PER_TOKEN = 36
SHORT, LONG = 4, 16
"""Tokens that must match at least; those of the longer chain."""
LONGEST = 32
"""Longer matches say no more."""
CANDIDATES = 8
"""So many of the latest places of each chain are looked at."""
END = -1
"""Stands between texts: nothing matches it."""


class _Chain:
    """Places behind equal n-grams, the latest first: `latest` by hash, `before` by place, as distances."""

    def __init__(self, size: int, capacity: int) -> None:
        self.size, self._capacity = size, capacity
        self._latest = np.zeros(capacity, np.int64).data
        self._before = np.zeros(capacity, np.int32).data

    def add(self, place: int, owner: int, gram: tuple[int, ...]) -> None:
        slot = hash((owner, gram)) % self._capacity
        self._before[place % self._capacity] = min(place - self._latest[slot], self._capacity)
        self._latest[slot] = place

    def places(self, oldest: int, owner: int, gram: tuple[int, ...]) -> list[int]:
        """Where the gram may have been, among the places behind `oldest`."""
        found: list[int] = []
        place = self._latest[hash((owner, gram)) % self._capacity]
        while place > oldest and len(found) < CANDIDATES:
            found.append(place)
            place -= self._before[place % self._capacity]
        return found


class RecentTexts:
    """`owner`: whose text it is; nobody else ever finds it."""

    def __init__(self, memory: int = MEMORY) -> None:
        self.capacity, self.end = max(memory // PER_TOKEN, LONGEST), 1
        self._first = 0  # places before this one are forgotten
        self._tokens = np.zeros(0, np.int32).data  # the ring comes with the first text
        self._owners = np.zeros(0, np.int64).data
        self._chains: tuple[_Chain, ...] = ()

    def add(self, owner: int, context: Seq[int], text: Seq[int]) -> None:
        """A text, and the last tokens of what it followed, by which its beginning is found."""
        if not self._chains:
            self._tokens = np.zeros(self.capacity, np.int32).data
            self._owners = np.zeros(self.capacity, np.int64).data
            self._chains = _Chain(LONG, self.capacity), _Chain(SHORT, self.capacity)
        whole = [*context[-LONGEST:], *text][-self.capacity + 1 :]
        first, start = len(whole) - len(text), self.end + 1
        for index, token in enumerate((END, *whole), self.end):
            self._tokens[index % self.capacity], self._owners[index % self.capacity] = token, owner
        self.end = start + len(whole)
        for chain in self._chains:
            for index in range(max(first, chain.size), len(whole)):
                chain.add(start + index, owner, tuple(whole[index - chain.size : index]))

    def find(self, owner: int, tokens: Seq[int], limit: int) -> tuple[list[int], int]:
        """At most `limit` tokens that followed the longest match of the end of `tokens`, and its length; 0: none."""
        if not self._chains or len(tokens) < SHORT:
            return [], 0
        tail = list(tokens[-LONGEST:])
        best, longest = 0, SHORT - 1
        for chain in self._chains:
            for place in chain.places(self._oldest, owner, tuple(tail[-chain.size :])):
                if (size := self._matched(place, owner, tail)) > longest:
                    best, longest = place, size
            if longest >= chain.size:
                return self._following(best, limit), longest
        return [], 0

    @property
    def _oldest(self) -> int:
        """The first place that the ring still holds."""
        return max(self.end - self.capacity, self._first)

    def _matched(self, place: int, owner: int, tail: Seq[int]) -> int:
        """How many tokens before `place` are those at the end of `tail`."""
        ring, capacity, oldest = self._tokens, self.capacity, self._oldest
        size = 0
        if self._owners[place % capacity] != owner:
            return 0
        while (
            size < len(tail) and place - 1 - size >= oldest and ring[(place - 1 - size) % capacity] == tail[-1 - size]
        ):
            size += 1
        return size

    def _following(self, place: int, limit: int) -> list[int]:
        found: list[int] = []
        for index in range(place, min(place + limit, self.end)):
            token = self._tokens[index % self.capacity]
            if token == END:
                break
            found.append(token)
        return found

    def forget(self) -> None:
        """All of it. The ring stays: new memory would have to be cleared by the system first, page by page."""
        self._first = self.end
