"""Tokens to text while they come: complete characters only, and nothing that later changes."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections.abc import Iterable

from headstart.text.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Push ids, get text. All pushes and the flush joined equal `Tokenizer.decode` of all ids.

    `continues`: the ids go on from a prompt, so a space the tokenizer would strip where a text starts is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset[int]()
        self._decoder = _utf8("replace")
        self._to_strip = 0 if continues else tokenizer.rule.strip_start

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; an incomplete character is held back."""
        if token_id in self._skip:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        while self._to_strip and data:
            if not data.startswith(b" "):
                self._to_strip = 0
                break
            data = data[1:]
            self._to_strip -= 1
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The end of the text: U+FFFD for a character that never became complete."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class StopChecker:
    """Cuts a growing text before the first stop string.

    First is the one that is complete first (the longer of two that end together), so the cut does not depend on the
    sizes of the pieces. Only text that may begin a stop string is held back.
    """

    def __init__(self, stop: Iterable[str], *, keeps: bool = False) -> None:
        """`keeps`: cut behind the stop string."""
        self._stop = tuple(sorted(text for text in stop if text))
        self._keeps = keeps
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self._stopped = False
        self.found: str | None = None  # the stop string that has cut the text

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """What can be shown now, and whether a stop string was found. After that, nothing more comes.

        A stop string that is complete while `may_stop` is False counts for nothing; one that only begins there may
        still stop the text later."""
        if self._stopped:
            return "", True
        if not self._stop:
            return text, False
        known, text = len(self._held), self._held + text
        cut = self._first_stop(text, known) if may_stop else None
        if cut is not None:
            self._held, self._stopped = "", True
            return text[:cut], True
        keep = len(text) - self._possible_start(text)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """The end of the text: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str, known: int) -> int | None:
        """Where the first stop string begins of those that end after `known` characters."""
        places = ((stop, text.find(stop, max(known - len(stop) + 1, 0))) for stop in self._stop)
        ends = [(at + len(stop), at) for stop, at in places if at >= 0]
        if not ends:
            return None
        end, start = min(ends)
        self.found = text[start:end]
        return end if self._keeps else start

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            place = bisect_left(self._stop, end)  # they are sorted: what begins with `end` follows it at once
            if place < len(self._stop) and self._stop[place].startswith(end):
                return size
        return 0
