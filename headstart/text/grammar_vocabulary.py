"""A vocabulary as llguidance wants it: the bytes of each id, and text to ids."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

_ANCHOR = "\n"  # is a token of its own in sentencepiece vocabularies, so the text behind it is no start of a text
FORCED_WINDOW = 2048
"""Bytes of a forced text that are encoded: only its first token is asked for, again at each of its tokens."""


class Speller(Protocol):
    """What constraints need of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    @property
    def eos_ids(self) -> frozenset[int]: ...
    @property
    def bos_id(self) -> int | None: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def token_text(self, token_id: int) -> str: ...
    def encode(self, text: str, add_special: bool = False, parse_special: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Spelling:
    """A Speller that is data, for another process. It cannot encode: forced texts get the longest tokens first."""

    tokens: list[bytes]
    special_ids: frozenset[int]
    eos_ids: frozenset[int]
    bos_id: int | None

    @classmethod
    def of(cls, speller: Speller) -> Spelling:
        tokens = [speller.token_bytes(token) for token in range(speller.vocab_size)]
        return cls(tokens, speller.special_ids, speller.eos_ids, speller.bos_id)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id] if 0 <= token_id < len(self.tokens) else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def encode(self, text: str, add_special: bool = False, parse_special: bool = True) -> list[int]:
        return []


class Vocabulary:
    """A Speller's tokens, and a call that gives the ids of a text. vocab_size: ids that logits have."""

    def __init__(self, speller: Speller, vocab_size: int, end_ids: Iterable[int]) -> None:
        self._speller = speller
        self._size = vocab_size
        # A last token without text is the end-of-text id of a tokenizer that has none.
        self.tokens = [speller.token_bytes(token) for token in range(vocab_size)] + [b""]
        ends = frozenset(end_ids)
        self.special_token_ids = sorted(token for token in speller.special_ids | ends if token < vocab_size)
        self.eos_token_id = min(ends, default=vocab_size)
        self.bos_token_id = speller.bos_id
        special = set(self.special_token_ids)
        plain = ((piece, token) for token, piece in enumerate(self.tokens) if piece and token not in special)
        self._id_of = dict(plain)
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """The ids whose bytes are those of `text`, as the tokenizer writes it within a longer text; of the beginning
        of a long text only."""
        data = _beginning(text.encode() if isinstance(text, str) else text)
        readable = data.decode("utf-8", "replace")
        for anchor in ("", _ANCHOR):
            ids = self._after(anchor.encode(), self._speller.encode(anchor + readable, parse_special=False))
            spelled = b"".join(map(self._speller.token_bytes, ids))
            if spelled == data and max(ids, default=0) < self._size:
                return ids
        return self._longest_first(data)

    def _after(self, anchor: bytes, ids: list[int]) -> list[int]:
        """`ids` without those that spell `anchor`; all of them if some spell more than it."""
        seen = b""
        for count, token in enumerate(ids):
            if anchor and seen.endswith(anchor):
                return ids[count:]
            seen += self._speller.token_bytes(token)
        return ids

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(data):
            stops = range(min(len(data), start + self._longest), start, -1)
            stop = next((stop for stop in stops if data[start:stop] in self._id_of), None)
            if stop is None:
                return ids  # no token spells the next byte
            ids.append(self._id_of[data[start:stop]])
            start = stop
        return ids


def _beginning(data: bytes) -> bytes:
    """What is encoded of `data`: before a space if there is one, where hardly any tokenizer writes across."""
    if len(data) <= FORCED_WINDOW:
        return data
    cut = data.rfind(b" ", FORCED_WINDOW // 2, FORCED_WINDOW)
    if cut < 0:
        whole = (i for i in range(FORCED_WINDOW, 0, -1) if data[i] & 0xC0 != 0x80)  # no character is cut
        cut = next(whole, FORCED_WINDOW)
    return data[:cut]
