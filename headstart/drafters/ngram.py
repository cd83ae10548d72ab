"""Prompt lookup (Saxena 2023): drafts the tokens that followed the same n-gram earlier in the sequence, in outputs of
other requests of the same owner, or in a corpus (as REST does: He 2023). Needs no model."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from operator import mul
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from headstart.core import Draft, Sequence
from headstart.drafters.base import Drafter, DraftRequest, TargetModel, TextLookup

MAX_MATCH = 16  # longest match in the sequence that is counted; longer ones are no more reliable
SHARED = "shared"  # Draft.method of drafts from other texts, whose acceptance is estimated separately


@dataclass
class _Index:
    """n-grams of one sequence."""

    num_indexed: int = 0
    # n-gram that ends before the last token -> position after its latest occurrence
    after: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter(Drafter):
    """The longest match wins, then the latest one. The index grows with the sequence."""

    method = "ngram"

    def __init__(
        self, smallest: int, largest: int, shared: "SharedLookup | None" = None, corpus: TextLookup | None = None
    ) -> None:
        self._sizes, self._shared, self._corpus = range(smallest, largest + 1), shared, corpus
        self._indexes: dict[Sequence, _Index] = {}

    @classmethod
    def attach(cls, target: TargetModel) -> Self:
        return cls(*target.ngram, SharedLookup() if target.shared_lookup else None, target.lookup_corpus)

    def propose(self, requests: Seq[DraftRequest]) -> None:
        for request in requests:
            sequence, tokens = request.sequence, request.sequence.tokens
            start, size = self._find(sequence)
            matched = _matched(tokens, start, size) if size else 0
            elsewhere, longest = list[int](), matched
            texts: TextLookup | None
            for texts, owner in ((self._shared, _owner(sequence)), (self._corpus, ANYONE)):
                if texts and longest < MAX_MATCH:
                    found, longer = texts.find(owner, tokens, request.depth)
                    if longer > longest:
                        elsewhere, longest = found, longer
            if elsewhere:
                scores = [longest / MAX_SHARED_MATCH] * len(elsewhere)
                sequence.draft = Draft(elsewhere, method=SHARED, scores=scores)
            elif size:
                following = tokens[start : start + request.depth]
                # longer matches are right more often; engine.acceptance calibrates the scores
                sequence.draft = Draft(following, method=self.method, scores=[matched / MAX_MATCH] * len(following))

    def _find(self, sequence: Sequence) -> tuple[int, int]:
        """Position after the longest match, and the match's length; length 0: no match."""
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
        if self._shared and sequence.num_output and sequence.finish_reason != "error":
            prompt, tokens = sequence.num_prompt, sequence.tokens
            self._shared.add(_owner(sequence), tokens[:prompt], tokens[prompt:])

    def clear(self) -> None:
        if self._shared:
            self._shared.clear()


def _owner(sequence: Sequence) -> int:
    """Texts are shared within an API key and a cache salt. Python's string hash is salted per process."""
    return hash((sequence.request.owner, sequence.request.cache_salt))


def _matched(tokens: Seq[int], start: int, size: int) -> int:
    """Length of the match before position `start` with the end of the text; at least `size` tokens are known to
    match."""
    while size < MAX_MATCH and size < start and tokens[start - 1 - size] == tokens[-1 - size]:
        size += 1
    return size


DRAFTER = NgramDrafter


MEMORY = 64 << 20  # bytes for all stored texts
PER_TOKEN = 36  # bytes per stored token
SHORT, LONG = 4, 16  # minimum match length; n-gram length of the second chain
MAX_SHARED_MATCH = 32  # longest match that is counted; longer ones are no more reliable
CANDIDATES = 8  # latest places of each chain that are compared
ANYONE = 0  # owner of the corpus
END = -1  # separates texts in the ring; matches no token
MASK, SHIFT, MULTIPLIER = 2**64 - 1, 33, 0x9E3779B97F4A7C15  # of the hash of an n-gram (_Chain._slots)
WEIGHTS = [pow(MULTIPLIER, place, 2**64) for place in range(1, LONG + 1)]  # of each token of an n-gram in its hash


class _Chain:
    """Ring positions after equal n-grams, latest first: `_latest` by hash, `_before` by position, as distances."""

    def __init__(self, size: int, capacity: int) -> None:
        self.size, self._capacity, self._weights = size, capacity, np.array(WEIGHTS[:size], np.uint64)
        self._latest = np.zeros(capacity, np.int64)
        self._before = np.zeros(capacity, np.int32)

    def add(self, owner: int, start: int, tokens: NDArray[np.uint64]) -> None:
        """Adds every n-gram of `tokens` [n] (n at least `size`), which lie at ring positions `start`, start + 1, ..."""
        slots = self._slots(np.correlate(tokens, self._weights, "valid"), owner)
        order = np.argsort(slots, kind="stable")
        slots, places = slots[order], order + (start + self.size)
        previous, repeated = self._latest[slots], slots[1:] == slots[:-1]
        previous[1:][repeated] = places[:-1][repeated]
        self._before[places % self._capacity] = np.minimum(places - previous, self._capacity)
        self._latest[slots] = places  # of equal slots the last place stays

    def places(self, oldest: int, owner: int, gram: Seq[int]) -> list[int]:
        """Positions after `oldest` where the n-gram may have occurred."""
        found, latest, before = list[int](), self._latest.data, self._before.data
        place = latest[self._slots(sum(map(mul, gram, WEIGHTS)), owner)]
        while place > oldest and len(found) < CANDIDATES:
            found.append(place)
            place -= before[place % self._capacity]
        return found

    def _slots(self, sums: Any, owner: int) -> Any:
        """Index in `_latest` of n-grams with these weighted sums of tokens: an int, or uint64 [n]."""
        return (((sums ^ owner & MASK) * MULTIPLIER & MASK) >> SHIFT) % self._capacity


class SharedLookup:
    """Index over recent outputs of all requests; an owner finds only its own texts.

    A ring of tokens, oldest dropped first, with a hash chain for each of two n-gram lengths, as in LZ77 compressors.
    The long n-gram finds the text that a request repeats among many that start alike; the short one finds all else.
    Candidates are compared token by token: the result is the longest match among the latest ones (numbers in docs/log).
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self.capacity, self.end = max(memory // PER_TOKEN, MAX_SHARED_MATCH), 1
        self._first = 0  # places before this one are forgotten
        self._tokens = np.zeros(0, np.int32)  # the ring comes with the first text
        self._owners = np.zeros(0, np.int64)
        self._chains: tuple[_Chain, ...] = ()

    @classmethod
    def of_corpus(cls, tokens: Seq[int]) -> Self:
        """The index of one text that all requests look up."""
        lookup = cls(PER_TOKEN * (len(tokens) + MAX_SHARED_MATCH))
        lookup.add(ANYONE, (), tokens)
        return lookup

    def add(self, owner: int, context: Seq[int], text: Seq[int]) -> None:
        """Adds a text; `context` is the text before it, whose end helps to find the beginning."""
        if not self._chains:
            self._tokens = np.zeros(self.capacity, np.int32)
            self._owners = np.zeros(self.capacity, np.int64)
            self._chains = _Chain(LONG, self.capacity), _Chain(SHORT, self.capacity)
        whole = np.array([END, *context[-MAX_SHARED_MATCH:], *text][-self.capacity :])
        whole[0] = END
        places = np.arange(self.end, self.end + len(whole)) % self.capacity
        self._tokens[places], self._owners[places] = whole, owner
        first, start = len(whole) - len(text), self.end
        self.end += len(whole)
        for chain in self._chains:
            begin = max(first - chain.size, 1)
            if begin + chain.size < len(whole):
                chain.add(owner, start + begin, whole[begin:-1].astype(np.uint64))

    def find(self, owner: int, tokens: Seq[int], limit: int) -> tuple[list[int], int]:
        """Up to `limit` tokens after the longest match with the end of `tokens`, and the match's length; 0: none."""
        if not self._chains or len(tokens) < SHORT:
            return [], 0
        long, short = self._chains
        latest = short.places(self._oldest, owner, tokens[-SHORT:])
        if not latest:  # then the long chain has none either
            return [], 0
        tail = list(tokens[-MAX_SHARED_MATCH:])
        for size, places in ((LONG, long.places(self._oldest, owner, tail[-LONG:])), (SHORT, latest)):
            longest, best = max([(self._matched(place, owner, tail), place) for place in places], default=(0, 0))
            if longest >= size:
                return self._following(best, limit), longest
        return [], 0

    @property
    def _oldest(self) -> int:
        """First position that the ring still holds."""
        return max(self.end - self.capacity, self._first)

    def _matched(self, place: int, owner: int, tail: Seq[int]) -> int:
        """Number of tokens before `place` that equal the end of `tail`."""
        ring, capacity, oldest = self._tokens.data, self.capacity, self._oldest
        size = 0
        if self._owners[place % capacity] != owner:
            return 0
        while (
            size < len(tail) and place - 1 - size >= oldest and ring[(place - 1 - size) % capacity] == tail[-1 - size]
        ):
            size += 1
        return size

    def _following(self, place: int, limit: int) -> list[int]:
        found, ring = list[int](), self._tokens.data
        for index in range(place, min(place + limit, self.end)):
            token = ring[index % self.capacity]
            if token == END:
                break
            found.append(token)
        return found

    def clear(self) -> None:
        """Drops all texts. The ring's memory is kept: new memory would have to be zeroed by the system page by page."""
        self._first = self.end
