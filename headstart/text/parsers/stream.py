"""Parsers as generators over text that still comes: `yield` asks for more of it.

A grammar is then written top-down as if the text were whole, and cannot depend on where the text was split.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeAlias, TypeVar

from headstart.text.parsers.events import Content, Event, joined

_T = TypeVar("_T")
Steps: TypeAlias = Generator[None, None, _T]
Sink: TypeAlias = Callable[[str], None]


class Parser(Protocol):
    """Takes text as it streams, gives events; all events joined do not depend on how the text was split."""

    def push(self, text: str) -> list[Event]:
        """What is certain now. Only text that may begin a marker, or a call without a name yet, is held back."""
        ...

    def finish(self) -> list[Event]:
        """What was held back. Nothing may be pushed afterwards."""
        ...


class NotThis(Exception):
    """The text is not what the grammar wants here."""


class Ended(NotThis):
    """The text ends where the grammar wants more."""


class StreamParser(ABC):
    """A text with a reading position, and the steps that formats are made of."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._closed = False
        self._floating = False  # no step remembers a position, so text that was read can go
        self._events: list[Event] = []
        self._run = self._parse()
        next(self._run)

    def push(self, text: str) -> list[Event]:
        assert not self._closed, "push after finish"
        if text:
            if self._floating:
                self._forget()
            self._text += text
            next(self._run)
        return self._take()

    def finish(self) -> list[Event]:
        if not self._closed:
            self._closed = True
            for _ in self._run:
                raise AssertionError("a parser asks for text after its end")
        return self._take()

    def _parse(self) -> Steps[None]:
        yield  # the text is empty so far
        yield from self._grammar()
        yield from self._plain()

    @abstractmethod
    def _grammar(self) -> Steps[None]:
        """Reads the text. What it leaves is content."""

    def _take(self) -> list[Event]:
        events, self._events = joined(self._events), []
        return events

    def _content(self, text: str) -> None:
        self._events.append(Content(text))

    # Steps. Each leaves `_at` behind what it read, and raises `NotThis` where the text does not fit.

    def _forget(self) -> None:
        """Drop the text read so far; positions from before do not count any more."""
        self._text, self._at = self._text[self._at :], 0

    def _more(self) -> Steps[None]:
        if self._closed:
            raise Ended
        yield

    def _peek(self) -> Steps[str]:
        """The next character, not read yet."""
        while self._at == len(self._text):
            yield from self._more()
        return self._text[self._at]

    def _plain(self) -> Steps[None]:
        """All text from here on is content."""
        while True:
            self._content(self._text[self._at :])
            self._text, self._at = "", 0
            if self._closed:
                return
            yield

    def _space(self) -> Steps[None]:
        """Skip white space; the end of the text is fine."""
        while True:
            while self._at < len(self._text) and self._text[self._at].isspace():
                self._at += 1
            if self._closed or self._at < len(self._text):
                return
            yield

    def _accept(self, *literals: str) -> Steps[str]:
        """Read the longest literal that stands here; empty when none does."""
        while True:
            rest = self._text[self._at : self._at + max(map(len, literals))]
            if self._closed or not any(len(rest) < len(x) and x.startswith(rest) for x in literals):
                break
            yield
        literal = max((x for x in literals if rest.startswith(x)), key=len, default="")
        self._at += len(literal)
        return literal

    def _expect(self, *literals: str) -> Steps[str]:
        literal = yield from self._accept(*literals)
        if not literal:
            rest = self._text[self._at :]
            raise Ended if self._closed and any(x.startswith(rest) for x in literals) else NotThis
        return literal

    def _stream_until(self, stops: Sequence[str], sink: Sink) -> Steps[str]:
        """Give the text before the first of `stops` to `sink` as it comes, and read that stop.

        At the end of the text all of it was given, then `Ended` is raised.
        """
        while True:
            places = [(at, -len(x), x) for x in stops if (at := self._text.find(x, self._at)) >= 0]
            end, _, stop = min(places, default=(len(self._text), 0, ""))
            if not stop and not self._closed:
                end -= self._possible_start(stops)
            sink(self._text[self._at : end])
            self._at = end
            if stop:
                self._at += len(stop)
                return stop
            yield from self._more()

    def _run_of(self, pattern: re.Pattern[str], sink: Sink) -> Steps[None]:
        """Give as much as there is of characters that `pattern` repeats."""
        while True:
            match = pattern.match(self._text, self._at)
            assert match is not None
            sink(match[0])
            self._at = match.end()
            if self._closed or self._at < len(self._text):
                return
            yield

    def _until(self, *stops: str) -> Steps[tuple[str, str]]:
        """The text before the first of `stops`, and that stop."""
        parts: list[str] = []
        stop = yield from self._stream_until(stops, parts.append)
        return "".join(parts), stop

    def _possible_start(self, literals: Sequence[str]) -> int:
        """Length of the longest end of the unread text that begins one of `literals` but is none."""
        room = len(self._text) - self._at
        for size in range(min(max(map(len, literals), default=0) - 1, room), 0, -1):
            if any(len(x) > size and x.startswith(self._text[-size:]) for x in literals):
                return size
        return 0

    def _ending(self, literal: str) -> Steps[None]:
        """Read white space and `literal`, or the part of it that the end of the text left; otherwise read nothing."""
        start = self._at
        yield from self._space()
        taken = yield from self._accept(literal)
        if taken:
            return
        if self._closed and literal.startswith(self._text[self._at :]):
            self._at = len(self._text)
        else:
            self._at = start
