"""Base class of streaming parsers, the events that they emit, and a parser of JSON values.

A parser is a generator in which `yield` waits for more text. Its code reads top-down as if the text were complete, and
its events do not depend on how the text was split.
"""

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from string import hexdigits
from typing import TypeAlias, TypeVar

_SPACE = re.compile(r"[ \t\r\n]*")
_IN_STRING = {'"': re.compile(r'["\\\x00-\x1f]'), "'": re.compile(r"""['"\\\x00-\x1f]""")}
_QUOTES = tuple(_IN_STRING)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_CONSTANTS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_WORD = re.compile(r"[-+.\w]*")  # a word that may be a number or a constant
MAX_NESTING = 64
_CLOSER = {"{": "}", "[": "]"}
_T = TypeVar("_T")
Steps: TypeAlias = Generator[None, None, _T]  # a part of a parser, called with `yield from`; returns _T
Sink: TypeAlias = Callable[[str], None]  # is called with text as it is read


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """The start of a call."""

    index: int  # of the call in its answer, from 0
    name: str  # of the function


@dataclass(frozen=True)
class Arguments:
    """A piece of a call's arguments. All pieces joined are one JSON text."""

    index: int  # of the call
    text: str


Event: TypeAlias = Content | Reasoning | ToolCall | Arguments


def merge_events(events: Iterable[Event]) -> list[Event]:
    """The events without empty ones, and with adjacent texts of one kind (and one call) joined."""
    merged: list[Event] = []
    for event in events:
        if isinstance(event, ToolCall):
            merged.append(event)
        elif event.text:
            last = merged[-1] if merged else None
            if isinstance(last, type(event)) and replace(last, text="") == replace(event, text=""):
                merged[-1] = replace(event, text=last.text + event.text)
            else:
                merged.append(event)
    return merged


class Mismatch(Exception):
    """The text does not match the grammar."""


class EndOfText(Mismatch):
    """The text ends where the grammar needs more."""


class Parser(ABC):
    """Turns streamed text into events. Holds a text with a reading position, and steps that subclasses combine.

    A step leaves `_position` after the text that it has read, and raises `Mismatch` if the text does not match."""

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._is_closed = self._is_cut_off = False
        self._may_drop_text = False  # True: no step holds an earlier position, so `push` may drop read text
        self._events: list[Event] = []
        self._generator = self._parse()
        next(self._generator)

    def push(self, text: str) -> list[Event]:
        """Add text; returns the events that are certain now. Possible markers and unnamed calls are held back."""
        assert not self._is_closed, "push after finish"
        if text:
            if self._may_drop_text:
                self._drop_read_text()
            self._text += text
            next(self._generator)
        return self._pop_events()

    def finish(self, *, is_cut_off: bool = False) -> list[Event]:
        """End the text; returns the events of the text that was held back. No push may follow. is_cut_off: the text has
        reached its maximum length, so an unnamed call at its end is no content."""
        if not self._is_closed:
            self._is_closed, self._is_cut_off = True, is_cut_off
            for _ in self._generator:
                raise AssertionError("a parser asks for text after its end")
        return self._pop_events()

    def _parse(self) -> Steps[None]:
        yield  # the text is still empty
        yield from self._grammar()
        yield from self._rest_is_content()

    @abstractmethod
    def _grammar(self) -> Steps[None]:
        """Read the text and emit events. Text that it leaves unread becomes content."""

    def _pop_events(self) -> list[Event]:
        events, self._events = merge_events(self._events), []
        return events

    def _content(self, text: str) -> None:
        self._events.append(Content(text))

    def _reasoning(self, text: str) -> None:
        self._events.append(Reasoning(text))

    def _drop_read_text(self) -> None:
        """Drop the text read so far; earlier positions become invalid."""
        self._text, self._position = self._text[self._position :], 0

    def _wait_for_text(self) -> Steps[None]:
        if self._is_closed:
            raise EndOfText
        yield

    def _peek(self) -> Steps[str]:
        """The next character, which stays unread."""
        while self._position == len(self._text):
            yield from self._wait_for_text()
        return self._text[self._position]

    def _rest_is_content(self) -> Steps[None]:
        """Emit all further text as content."""
        while True:
            self._content(self._text[self._position :])
            self._text, self._position = "", 0
            if self._is_closed:
                return
            yield

    def _skip_space(self) -> Steps[None]:
        """Skip white space; the text may end there."""
        while True:
            while self._position < len(self._text) and self._text[self._position].isspace():
                self._position += 1
            if self._is_closed or self._position < len(self._text):
                return
            yield

    def _accept(self, *literals: str) -> Steps[str]:
        """Read and return the longest of `literals` that comes next; an empty string if none does."""
        while True:
            rest = self._text[self._position : self._position + max(map(len, literals))]
            if self._is_closed or not any(len(rest) < len(x) and x.startswith(rest) for x in literals):
                break
            yield
        literal = max((x for x in literals if rest.startswith(x)), key=len, default="")
        self._position += len(literal)
        return literal

    def _expect(self, *literals: str) -> Steps[str]:
        """Like _accept, but one of the literals must match."""
        literal = yield from self._accept(*literals)
        if not literal:
            rest = self._text[self._position :]
            raise EndOfText if self._is_closed and any(x.startswith(rest) for x in literals) else Mismatch
        return literal

    def _stream_until(self, stops: Sequence[str], sink: Sink) -> Steps[str]:
        """Pass the text before the first of `stops` to `sink` as it comes; read and return that stop. Without a stop,
        passes all text on and raises EndOfText."""
        while True:
            places = [(at, -len(x), x) for x in stops if (at := self._text.find(x, self._position)) >= 0]
            end, _, stop = min(places, default=(len(self._text), 0, ""))
            if not stop and not self._is_closed:
                end -= self._possible_start(stops)
            sink(self._text[self._position : end])
            self._position = end
            if stop:
                self._position += len(stop)
                return stop
            yield from self._wait_for_text()

    def _read_run(self, pattern: re.Pattern[str], sink: Sink) -> Steps[None]:
        """Pass characters to `sink` as long as they match `pattern`, such as `\\w*`. It must match an empty text."""
        while True:
            match = pattern.match(self._text, self._position)
            assert match is not None
            sink(match[0])
            self._position = match.end()
            if self._is_closed or self._position < len(self._text):
                return
            yield

    def _read_until(self, *stops: str) -> Steps[tuple[str, str]]:
        """Read and return the text before the first of `stops`, and that stop."""
        parts: list[str] = []
        stop = yield from self._stream_until(stops, parts.append)
        return "".join(parts), stop

    def _possible_start(self, literals: Sequence[str]) -> int:
        """Length of the longest suffix of the unread text that is a proper prefix of one of `literals`."""
        unread = len(self._text) - self._position
        for size in range(min(max(map(len, literals), default=0) - 1, unread), 0, -1):
            if any(len(x) > size and x.startswith(self._text[-size:]) for x in literals):
                return size
        return 0

    def _ending(self, *literals: str) -> Steps[None]:
        """Read each of `literals` that follows in turn, or a prefix of it at the end of the text, and white space
        before it."""
        for literal in literals:
            start = self._position
            yield from self._skip_space()
            if not (yield from self._accept(literal)):
                is_cut = self._is_closed and literal.startswith(self._text[self._position :])
                self._position = len(self._text) if is_cut else start


class PlainParser(Parser):
    """A parser for plain answers: all text is content."""

    def _grammar(self) -> Steps[None]:
        yield from ()


def escape_json(text: str) -> str:
    """`text` escaped for a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def word_as_json(word: str) -> str:
    """A constant of JSON or Python, or a number, as JSON; any other word as a JSON string."""
    if word in _CONSTANTS:
        return _CONSTANTS[word]
    return word if is_json_number(word) else json.dumps(word, ensure_ascii=False)


def is_json_number(word: str) -> bool:
    """Whether `word` is a number of JSON that a float can hold."""
    return bool(_NUMBER.fullmatch(word)) and math.isfinite(float(word))


class JsonValueParser(Parser):
    """Steps that read one JSON value and pass its text to a sink.

    Valid values are passed on unchanged. Control characters inside strings, and the faults that `_container` names, are
    repaired.
    """

    def _json_value(self, sink: Sink) -> Steps[None]:
        first = yield from self._peek()
        if first in _QUOTES:
            yield from self._string(sink)
        elif first in _CLOSER:
            yield from self._container(sink)
        else:
            yield from self._scalar(sink)

    def _json_text(self) -> Steps[str]:
        """Read a complete JSON value; returns its text."""
        parts: list[str] = []
        yield from self._json_value(parts.append)
        return "".join(parts)

    def _json_string(self) -> Steps[str]:
        """Read a complete JSON string; returns its value."""
        if (yield from self._peek()) != '"':
            raise Mismatch
        text = yield from self._json_text()
        try:
            return str(json.loads(text))
        except ValueError:
            raise Mismatch from None

    def _container(self, sink: Sink) -> Steps[None]:
        """Read an object or array. Python's constants and quotes, bare words, and commas before a closing bracket are
        repaired. Before a Mismatch is raised, `sink` gets the text that completes the JSON value."""
        closers: list[str] = []
        expected = "item"  # or "colon", "value", "next": a comma or closing bracket
        try:
            while closers or expected == "item":
                yield from self._read_run(_SPACE, sink)
                mark = yield from self._peek()
                if mark in "}]" and expected in ("item", "next"):
                    yield from self._expect(closers[-1])
                    sink(closers.pop())
                    expected = "next"
                elif expected == "next":
                    yield from self._comma(sink, "[{" if closers[-1] == "]" else "")
                    expected = "item"
                elif expected == "colon":
                    sink((yield from self._expect(":")))
                    expected = "value"
                else:
                    expected = yield from self._item(sink, closers, expected)
        except EndOfText:
            raise
        except Mismatch:
            sink({"colon": ": null", "value": "null"}.get(expected, "") + "".join(reversed(closers)))
            raise

    def _comma(self, sink: Sink, opening: str) -> Steps[None]:
        """Read a comma and white space; pass them on only if a word, a string or a bracket of `opening` follows."""
        yield from self._expect(",")
        gap: list[str] = []
        yield from self._read_run(_SPACE, gap.append)
        mark = yield from self._peek()
        if mark in (*_QUOTES, *opening) or _WORD.fullmatch(mark):
            sink("," + "".join(gap))

    def _item(self, sink: Sink, closers: list[str], expected: str) -> Steps[str]:
        """Read a key, a scalar value, or an opening bracket; returns the next expected element, as in `_container`."""
        mark = yield from self._peek()
        is_key = expected == "item" and closers[-1:] == ["}"]
        if mark in _CLOSER and not is_key:
            closers.append(_CLOSER[mark])
            self._position += 1
            sink(mark)
            return "item"
        yield from self._string(sink) if mark in _QUOTES else self._scalar(sink, is_key=is_key)
        return "colon" if is_key else "next"

    def _string(self, sink: Sink) -> Steps[None]:
        quote = self._text[self._position]
        self._position += 1
        sink('"')
        while True:
            mark = yield from self._stream_to(_IN_STRING[quote], sink)
            self._position += 1
            if mark == quote:
                sink('"')
                return
            if mark == "\\":
                yield from self._escape_sequence(sink)
            else:
                sink(escape_json(mark))

    def _escape_sequence(self, sink: Sink) -> Steps[None]:
        """Read an escape sequence after its backslash. A backslash that begins no JSON escape becomes a literal one."""
        kind = yield from self._peek()
        self._position += 1
        digits = ""
        while kind == "u" and len(digits) < 4 and (yield from self._peek()) in hexdigits:
            digits += self._text[self._position]
            self._position += 1
        if kind in '"\\/bfnrt' or len(digits) == 4:
            sink(f"\\{kind}{digits}")
        else:
            sink(kind if kind == "'" else escape_json("\\" + kind) + digits)

    def _scalar(self, sink: Sink, *, is_key: bool = False) -> Steps[None]:
        """Read a word and pass it on: unchanged if it is JSON, translated if it is Python's, else as a string."""
        yield from self._peek()
        word = yield from self._read_word()
        if not word:
            raise Mismatch
        written = json.dumps(word, ensure_ascii=False) if is_key else word_as_json(word)
        is_cut_off = written.startswith('"') and self._is_closed and self._position == len(self._text)
        sink(word if is_cut_off else written)

    def _read_word(self) -> Steps[str]:
        """Read a word that may be a number or a constant; an empty text if none follows."""
        parts: list[str] = []
        yield from self._read_run(_WORD, parts.append)
        return "".join(parts)

    def _stream_to(self, pattern: re.Pattern[str], sink: Sink) -> Steps[str]:
        """Pass the text before the first match to `sink`; returns the matching character, which stays unread."""
        while True:
            match = pattern.search(self._text, self._position)
            end = match.start() if match else len(self._text)
            sink(self._text[self._position : end])
            self._position = end
            if match:
                return match[0]
            yield from self._wait_for_text()
