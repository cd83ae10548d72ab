"""JSON values read as they stream: their ends are found, their insides are passed on."""

from __future__ import annotations

import json
import re

from headstart.text.parsers.stream import NotThis, Sink, Steps, StreamParser

_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\\x00-\x1f]')
_SCALAR = re.compile(r"[-+.\w]*")
_CLOSER = {"{": "}", "[": "]"}


def escaped(text: str) -> str:
    """`text` as it stands inside a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class JsonSteps(StreamParser):
    """Steps that read one JSON value and give it to a sink.

    Values go through as written, with one repair: control characters inside strings, which models write and JSON
    forbids, are escaped. Only strings and brackets are checked.
    """

    def _json_value(self, sink: Sink) -> Steps[None]:
        first = yield from self._peek()
        if first == '"':
            yield from self._string(sink)
        elif first in _CLOSER:
            yield from self._container(sink)
        else:
            yield from self._scalar(sink)

    def _json_text(self) -> Steps[str]:
        """A whole value as JSON text."""
        parts: list[str] = []
        yield from self._json_value(parts.append)
        return "".join(parts)

    def _json_string(self) -> Steps[str]:
        """The value of a whole string."""
        if (yield from self._peek()) != '"':
            raise NotThis
        text = yield from self._json_text()
        try:
            return str(json.loads(text))
        except ValueError:
            raise NotThis from None

    def _container(self, sink: Sink) -> Steps[None]:
        open_brackets: list[str] = []
        while True:
            mark = yield from self._pass_to(_STRUCTURE, sink)
            if mark == '"':
                yield from self._string(sink)
                continue
            if mark in _CLOSER:
                open_brackets.append(_CLOSER[mark])
            elif open_brackets.pop() != mark:
                raise NotThis
            sink(mark)
            self._at += 1
            if not open_brackets:
                return

    def _string(self, sink: Sink) -> Steps[None]:
        self._at += 1
        sink('"')
        while True:
            mark = yield from self._pass_to(_IN_STRING, sink)
            self._at += 1
            sink(mark if mark in '"\\' else escaped(mark))
            if mark == '"':
                return
            if mark == "\\":
                sink((yield from self._peek()))
                self._at += 1

    def _scalar(self, sink: Sink) -> Steps[None]:
        if not _SCALAR.fullmatch((yield from self._peek())):
            raise NotThis
        yield from self._run_of(_SCALAR, sink)

    def _pass_to(self, pattern: re.Pattern[str], sink: Sink) -> Steps[str]:
        """Give the text before the first match to `sink`; the character found is not read yet."""
        while True:
            match = pattern.search(self._text, self._at)
            end = match.start() if match else len(self._text)
            sink(self._text[self._at : end])
            self._at = end
            if match:
                return match[0]
            yield from self._more()
