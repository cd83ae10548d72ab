"""Tokens that may come whatever the text is about: a list of allowed ones, and words that must not be written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from typing import Self

import numpy as np

from headstart.core import Mask
from headstart.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[tuple[int, ...]]:
    """The ids of each word, and of the word behind a space where that begins with another token (as vLLM has it)."""
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(tokenizer.encode(word))
        spaced = tuple(tokenizer.encode(" " + word.lstrip()))
        found.append(bare)
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found.append(spaced)
    return [ids for ids in found if ids]


class TokenFilter:
    """Where one sequence stands: a core.Constraint that never ends a text. `banned`: the last token of each is not
    allowed behind the others."""

    done, accepting, error = False, True, ""

    def __init__(self, vocab_size: int, allowed: Iterable[int] | None, banned: Iterable[tuple[int, ...]]) -> None:
        self._base = np.full(-(-vocab_size // 32), 0 if allowed is not None else 0xFFFFFFFF, np.uint32)
        for token in allowed or ():
            self._base[token // 32] |= np.uint32(1 << token % 32)
        self._banned: dict[int, list[tuple[int, ...]]] = {}  # by the token before the last
        for ids in banned:
            if len(ids) > 1:
                self._banned.setdefault(ids[-2], []).append(ids)
            elif 0 <= ids[0] < vocab_size:
                _clear(self._base, ids[0])
        self._tokens: list[int] = []

    def masks(self, draft: Seq[int], count: int | None = None) -> Mask:
        """[k + 1, words], or the last `count` rows of it."""
        tokens = [*self._tokens, *draft]
        num_rows = len(draft) + 1 if count is None else count
        rows = np.tile(self._base, (num_rows, 1))
        for row in range(num_rows):
            before = len(tokens) - (num_rows - 1 - row)
            for ids in self._banned.get(tokens[before - 1], ()) if before > 0 else ():
                if before >= len(ids) - 1 and tuple(tokens[before - len(ids) + 1 : before]) == ids[:-1]:
                    _clear(rows[row], ids[-1])
        return rows

    def fitting(self, draft: Seq[int]) -> int:
        """How many of the first drafted tokens are allowed."""
        rows = self.masks(draft)
        return next((i for i, token in enumerate(draft) if not _has(rows[i], token)), len(draft))

    def forced(self, limit: int) -> list[int]:
        """None: which token comes is for the model to say."""
        return []

    def advance(self, token: int) -> bool:
        """Take a token; False if it is not allowed."""
        if not _has(self.masks(())[0], token):
            return False
        self._tokens.append(token)
        return True

    def rollback(self, count: int) -> None:
        del self._tokens[len(self._tokens) - count :]

    def copy(self) -> Self:
        """One of its own at the same place."""
        twin = object.__new__(type(self))
        twin.__dict__ |= self.__dict__ | {"_tokens": self._tokens.copy()}
        return twin


def _clear(mask: Mask, token: int) -> None:
    mask[token // 32] &= ~np.uint32(1 << token % 32)


def _has(mask: Mask, token: int) -> bool:
    return bool(0 <= token < 32 * len(mask) and int(mask[token // 32]) >> token % 32 & 1)
