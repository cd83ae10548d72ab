"""Turns streamed tokens into text: complete characters only, cut exactly before a stop string.

Tokens are processed one by one, so the text does not depend on how many tokens a pass commits.
"""

import codecs
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

from headstart.core import Delta, FinishReason, Request
from headstart.text.tokenizer import Tokenizer

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns ids into text one by one. The results of `push` and `flush`, joined, equal `Tokenizer.decode` of all ids.

    `continues`: the ids continue a prompt, so a space at their start is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continues: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset[int]()
        self._decoder = _utf8("replace")
        self._to_strip = 0 if continues else tokenizer.rule.strip_start

    def push(self, token_id: int) -> str:
        """The text that this token completes. Bytes of an incomplete character are held back."""
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
        """The rest of the text, with U+FFFD for an incomplete character."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class StopChecker:
    """Cuts a growing text before the first stop string.

    The first stop string to be complete ends the text; if two end at the same place, the longer one does. The cut thus
    does not depend on how the text is split. Only text that may begin a stop string is held back.
    """

    def __init__(self, stop: Iterable[str], *, keeps_stop: bool = False) -> None:
        """`keeps_stop`: cut after the stop string instead of before it."""
        self._stop = tuple(sorted(text for text in stop if text))
        self._keeps_stop = keeps_stop
        self._max_length = max(map(len, self._stop), default=0)
        self._held = ""
        self._stopped = False
        self.found: str | None = None  # the stop string that was found

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """The text that can be shown now, and whether a stop string was found. After that, all text is dropped.

        A stop string that ends in a push with `may_stop` False is ignored. One that only begins there still counts."""
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
        """The text that is still held back."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str, known: int) -> int | None:
        """The position of the cut at the first stop string that ends after `known` characters."""
        places = ((stop, text.find(stop, max(known - len(stop) + 1, 0))) for stop in self._stop)
        ends = [(at + len(stop), at) for stop, at in places if at >= 0]
        if not ends:
            return None
        end, start = min(ends)
        self.found = text[start:end]
        return end if self._keeps_stop else start

    def _possible_start(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        for size in range(min(self._max_length - 1, len(text)), 0, -1):
            end = text[-size:]
            place = bisect_left(self._stop, end)  # sorted: a stop string that begins with `end` comes next
            if place < len(self._stop) and self._stop[place].startswith(end):
                return size
        return 0


@dataclass
class TextUpdate:
    """New text of one delta."""

    text: str = ""
    num_tokens: int = 0  # tokens of the delta up to the end of a stop string
    finish_reason: FinishReason | None = None  # "stop": the caller must abort the choice if the engine still runs it


@dataclass
class TextOutput:
    """The growing text of one choice."""

    tokenizer: Tokenizer
    request: Request
    continues: bool = False  # the text continues a raw prompt, so a space at its start is kept
    skip_special: bool = True  # leave out special tokens; parsers of tool calls need them (False)
    keeps_stop: bool = False  # the text includes its stop string or token
    num_tokens: int = 0
    _detokenizer: Detokenizer = field(init=False)
    _stops: StopChecker = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer, skip_special=self.skip_special, continues=self.continues)
        self._stops = StopChecker(self.request.params.stop, keeps_stop=self.keeps_stop)

    @property
    def stop_string(self) -> str | None:
        """The stop string that has ended the text; None without one."""
        return self._stops.found

    def push(self, delta: Delta) -> TextUpdate:
        """Add a delta's tokens; returns the new text. The last delta also releases the text that was held back."""
        update = TextUpdate()
        for token in delta.tokens:
            update.num_tokens += 1
            self.num_tokens += 1
            if self._push_token(token, update):
                update.finish_reason = "stop"
                return update
        update.finish_reason = delta.finish_reason
        if delta.finish_reason is not None:
            emitted, stopped = self._stops.push(self._detokenizer.flush())
            update.text += emitted if stopped else emitted + self._stops.flush()
            update.finish_reason = "stop" if stopped else delta.finish_reason
        return update

    def _push_token(self, token: int, update: TextUpdate) -> bool:
        """Add the text of a token. True if it completes a stop string."""
        if token in self.request.stop_ids and not self.keeps_stop:
            return False  # the text excludes stop tokens
        may_stop = self.num_tokens > self.request.params.min_tokens
        emitted, stopped = self._stops.push(self._detokenizer.push(token), may_stop=may_stop)
        update.text += emitted
        return stopped
