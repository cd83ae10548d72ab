"""A vocabulary for llguidance: the bytes of each id, and a function that encodes text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headstart.text.tokenizer import Tokenizer

_ANCHOR = "\n"  # text to encode before a forced text, so that sentencepiece adds no space at its start
FORCED_WINDOW = 2048  # maximum bytes of a forced text that are encoded: llguidance only uses the first token


@dataclass(frozen=True)
class TokenTable:
    """A tokenizer's vocabulary for the sandbox process. It cannot encode, so forced texts get the longest tokens."""

    tokens: list[bytes]  # by id
    special_ids: frozenset[int]
    eos_ids: frozenset[int]
    bos_id: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer | TokenTable) -> TokenTable:
        """The table of a tokenizer."""
        tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        return cls(tokens, tokenizer.special_ids, tokenizer.eos_ids, tokenizer.bos_id)

    @property
    def vocab_size(self) -> int:
        return len(self.tokens)

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id] if 0 <= token_id < len(self.tokens) else b""

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def encode(self, text: str, add_special: bool = False, parse_special: bool = True) -> list[int]:
        return []


class LibraryVocabulary:
    """The tokenizer interface of llguidance: tokens, and a call that encodes text. vocab_size: number of logits."""

    def __init__(self, tokenizer: Tokenizer | TokenTable, vocab_size: int, end_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._size = vocab_size
        # an additional last token without text is the end-of-text id if the tokenizer has none
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)] + [b""]
        ends = frozenset(end_ids)
        self.special_token_ids = sorted(token for token in tokenizer.special_ids | ends if token < vocab_size)
        self.eos_token_id = min(ends, default=vocab_size)
        self.bos_token_id = tokenizer.bos_id
        special = set(self.special_token_ids)
        self._id_of = {piece: token for token, piece in enumerate(self.tokens) if piece and token not in special}
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of `text` as the tokenizer encodes it inside a longer text; only the beginning of a long `text`."""
        data = _beginning(text.encode() if isinstance(text, str) else text)
        readable = data.decode("utf-8", "replace")
        for anchor in ("", _ANCHOR):
            ids = self._after(anchor.encode(), self._tokenizer.encode(anchor + readable, parse_special=False))
            spelled = b"".join(map(self._tokenizer.token_bytes, ids))
            if spelled == data and max(ids, default=0) < self._size:
                return ids
        return self._longest_first(data)

    def _after(self, anchor: bytes, ids: list[int]) -> list[int]:
        """`ids` without the leading ones that spell `anchor`; all ids if no id ends with `anchor`."""
        seen = b""
        for count, token in enumerate(ids):
            if anchor and seen.endswith(anchor):
                return ids[count:]
            seen += self._tokenizer.token_bytes(token)
        return ids

    def _longest_first(self, data: bytes) -> list[int]:
        """Ids that spell `data`, at each place the longest token; up to the first byte that no token begins with."""
        ids: list[int] = []
        start = 0
        while start < len(data):
            stops = range(min(len(data), start + self._longest), start, -1)
            stop = next((stop for stop in stops if data[start:stop] in self._id_of), None)
            if stop is None:
                return ids  # no token has the next byte
            ids.append(self._id_of[data[start:stop]])
            start = stop
        return ids


def _beginning(data: bytes) -> bytes:
    """The first bytes of `data`, cut before a space if possible, as tokens rarely cross one."""
    if len(data) <= FORCED_WINDOW:
        return data
    cut = data.rfind(b" ", FORCED_WINDOW // 2, FORCED_WINDOW)
    if cut < 0:
        cuts = (i for i in range(FORCED_WINDOW, 0, -1) if data[i] & 0xC0 != 0x80)  # between characters
        cut = next(cuts, FORCED_WINDOW)
    return data[:cut]
