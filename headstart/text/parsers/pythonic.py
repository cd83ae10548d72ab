"""Calls written in Python, `[f(a="b", n=1), g()]`, as the whole answer (Llama 3.2, Llama 4), converted to JSON."""

import re

from headstart.text.parsers.stream import MAX_NESTING, Mismatch, Sink, Steps, escape_json
from headstart.text.parsers.tools import ToolParser

_CLOSER = {"[": "]", "(": ")", "{": "}"}
_KEY = re.compile(r"\w*")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}


class PythonCallParser(ToolParser):
    """Reads calls whose arguments are strings, numbers, lists, tuples, dictionaries, or constants of Python or JSON."""

    strays = (")",)
    writes_json = True
    _tools_only = False  # True: only calls of the request's tools count, since without markers any list could be a call

    def _python_call(self) -> Steps[None]:
        name = yield from self._name()
        if self._tools_only and name not in self._names:
            raise Mismatch
        yield from self._expect("(")
        yield from self._skip_space()
        while not (yield from self._accept(")")):
            key = yield from self._key_name()
            if not self._is_announced:
                self._announce(name)
            self._begin_member(key)
            yield from self._value(self._arguments, MAX_NESTING)
            yield from self._skip_space()
            if (yield from self._expect(",", ")")) == ")":
                break
            yield from self._skip_space()
        if not self._is_announced:
            self._announce(name)
        self._complete_arguments()
        self._drop_read_text()
        yield from self._drop_strays()

    def _key_name(self) -> Steps[str]:
        parts: list[str] = []
        yield from self._read_run(_KEY, parts.append)
        yield from self._skip_space()
        yield from self._expect("=")
        yield from self._skip_space()
        return "".join(parts)

    def _value(self, sink: Sink, depth: int) -> Steps[None]:
        yield from self._skip_space()
        first = yield from self._peek()
        if first in "\"'":
            yield from self._quoted(sink)
        elif first in _CLOSER and depth:
            self._position += 1
            yield from self._list_or_map(first, sink, depth - 1)
        else:
            yield from self._word(sink)

    def _list_or_map(self, opened: str, sink: Sink, depth: int) -> Steps[None]:
        def read_item(separator: str) -> Steps[None]:
            if opened == "{":
                key: list[str] = []
                yield from self._quoted(key.append)
                yield from self._skip_space()
                yield from self._expect(":")
                separator += "".join(key) + ": "
            sink(separator)
            yield from self._value(sink, depth)

        yield from self._items("{}" if opened == "{" else "[]", _CLOSER[opened], sink, read_item)

    def _quoted(self, sink: Sink) -> Steps[None]:
        quote = yield from self._expect('"', "'")
        sink('"')
        while True:
            stop = yield from self._stream_until((quote, "\\"), lambda text: sink(escape_json(text)))
            if stop == quote:
                break
            sink(escape_json((yield from self._escape())))
        sink('"')

    def _escape(self) -> Steps[str]:
        kind = yield from self._peek()
        self._position += 1
        if kind not in _DIGITS:
            return _ESCAPES.get(kind, kind if kind in "\\'\"/" else "\\" + kind)
        digits = ""
        while len(digits) < _DIGITS[kind]:
            digits += yield from self._peek()
            self._position += 1
        try:
            return chr(int(digits, 16))
        except (ValueError, OverflowError):
            return f"\\{kind}{digits}"


class PythonicParser(PythonCallParser):
    """The answer is a list of calls of the request's tools. Other answers, and text after the list, are content."""

    marks = ("[func_name1(params_name1=",)
    _tools_only = True

    def _grammar(self) -> Steps[None]:
        self._begin_call()
        try:
            yield from self._skip_space()
            yield from self._accept("<|python_start|>", "<|python_tag|>")
            yield from self._skip_space()
            yield from self._expect("[")
            whole = yield from self._call_list(self._python_call)
        except Mismatch as reason:
            self._abort_call(reason)
            return
        if whole:
            yield from self._ending("]")
            self._drop_read_text()
            yield from self._ending("<|python_end|>")


PARSER = PythonicParser
