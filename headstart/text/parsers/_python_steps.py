"""Calls written in Python, `[f(a="b", n=1), g()]`, read as they stream and given on as JSON."""

from __future__ import annotations

import json
import re

from headstart.text.parsers._json_steps import escaped
from headstart.text.parsers.stream import Ended, NotThis, Sink, Steps
from headstart.text.parsers.tools import ToolParser

_CLOSER = {"[": "]", "(": ")", "{": "}"}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_WORD = re.compile(r"[-+.\w]*")
_KEY = re.compile(r"\w*")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}
MOST_DEEP = 64


class PythonSteps(ToolParser):
    """Strings, numbers, lists, tuples and dictionaries, with Python's words or JSON's."""

    def _call_list(self) -> Steps[bool]:
        """Calls with commas between, from behind `[`. False where one that does not fit was left as text."""
        first = True
        while True:
            try:
                yield from self._python_call()
            except NotThis as reason:
                if first:
                    raise
                self._stop_call(reason)
                return False
            first = False
            yield from self._space()
            if not (yield from self._accept(",")):
                return True
            self._begin_call()
            yield from self._space()

    def _python_call(self) -> Steps[None]:
        name = yield from self._name()
        if self._must_know and name not in self._names:
            raise NotThis
        yield from self._expect("(")
        yield from self._space()
        while not (yield from self._accept(")")):
            key = yield from self._key_name()
            if not self._announced:
                self._announce(name)
            self._arguments((", " if self._has_arguments else "{") + json.dumps(key, ensure_ascii=False) + ": ")
            yield from self._value(self._arguments, MOST_DEEP)
            yield from self._space()
            if (yield from self._expect(",", ")")) == ")":
                break
            yield from self._space()
        if not self._announced:
            self._announce(name)
        self._arguments("}" if self._has_arguments else "{}")
        self._forget()

    _must_know = False
    """A call is one of the request's tools, for nothing else tells it from text."""

    def _key_name(self) -> Steps[str]:
        parts: list[str] = []
        yield from self._run_of(_KEY, parts.append)
        yield from self._space()
        yield from self._expect("=")
        yield from self._space()
        return "".join(parts)

    def _complete(self) -> None:
        self._arguments("}" if self._has_arguments else "{}")

    def _value(self, sink: Sink, depth: int) -> Steps[None]:
        yield from self._space()
        first = yield from self._peek()
        if first in "\"'":
            yield from self._quoted(sink)
        elif first in _CLOSER and depth:
            self._at += 1
            yield from self._items(first, sink, depth - 1)
        else:
            yield from self._word(sink)

    def _items(self, opened: str, sink: Sink, depth: int) -> Steps[None]:
        closer, is_map = _CLOSER[opened], opened == "{"
        sink("{" if is_map else "[")
        between = ""
        while True:
            yield from self._space()
            if (yield from self._accept(closer)):
                break
            sink(between)
            between = ", "
            if is_map:
                yield from self._quoted(sink)
                yield from self._space()
                yield from self._expect(":")
                sink(": ")
            yield from self._value(sink, depth)
            yield from self._space()
            if (yield from self._expect(",", closer)) == closer:
                break
        sink("}" if is_map else "]")

    def _quoted(self, sink: Sink) -> Steps[None]:
        quote = yield from self._expect('"', "'")
        sink('"')
        while True:
            stop = yield from self._stream_until((quote, "\\"), lambda text: sink(escaped(text)))
            if stop == quote:
                break
            sink(escaped((yield from self._escape())))
        sink('"')

    def _escape(self) -> Steps[str]:
        kind = yield from self._peek()
        self._at += 1
        if kind not in _DIGITS:
            return _ESCAPES.get(kind, kind if kind in "\\'\"/" else "\\" + kind)
        digits = ""
        while len(digits) < _DIGITS[kind]:
            digits += yield from self._peek()
            self._at += 1
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError):
            return f"\\{kind}{digits}"

    def _word(self, sink: Sink) -> Steps[None]:
        parts: list[str] = []
        yield from self._run_of(_WORD, parts.append)
        word = "".join(parts)
        if self._closed and self._at == len(self._text):
            raise Ended
        if word not in _WORDS and not _NUMBER.fullmatch(word):
            raise NotThis
        sink(_WORDS.get(word, word))
