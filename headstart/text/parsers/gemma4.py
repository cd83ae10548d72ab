"""Gemma 4: a name and an object whose keys are bare and whose strings stand between special tokens."""

from __future__ import annotations

import json
import re

from headstart.text.parsers._json_steps import escaped
from headstart.text.parsers.stream import Ended, NotThis, Sink, Steps
from headstart.text.parsers.tools import MarkedToolParser

_END, _QUOTE = "<tool_call|>", '<|"|>'
_SCALAR = re.compile(r"[-+.\w]*")
_KNOWN = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")
_PYTHON = {"None": "null", "True": "true", "False": "false"}
MOST_DEEP = 64


class Gemma4Parser(MarkedToolParser):
    """`<|tool_call>call:name{key:<|"|>text<|"|>,n:1,list:[...],object:{...}}<tool_call|>`; given on as JSON."""

    opens = ("<|tool_call>call:",)
    marks = ("<|tool_call>", _END)

    def _call(self, opened: str) -> Steps[None]:
        name = yield from self._name()
        yield from self._expect("{")
        self._announce(name)
        yield from self._object(self._arguments, MOST_DEEP)
        self._forget()
        yield from self._ending(_END)

    def _object(self, sink: Sink, depth: int) -> Steps[None]:
        """From behind its brace."""
        sink("{")
        between = ""
        while True:
            yield from self._space()
            if (yield from self._accept("}")):
                break
            key = yield from self._key()
            sink(between + json.dumps(key, ensure_ascii=False) + ": ")
            between = ", "
            yield from self._value(sink, depth)
            yield from self._space()
            if (yield from self._expect(",", "}")) == "}":
                break
        sink("}")

    def _key(self) -> Steps[str]:
        if (yield from self._accept(_QUOTE)):
            key, _ = yield from self._until(_QUOTE)
            yield from self._space()
            yield from self._expect(":")
            return key
        key, stop = yield from self._until(":", "}", _QUOTE)
        if stop != ":":
            raise NotThis
        return key.strip()

    def _value(self, sink: Sink, depth: int) -> Steps[None]:
        yield from self._space()
        if (yield from self._peek()) == _QUOTE[0]:
            opened = yield from self._expect(_QUOTE)
        else:
            opened = yield from self._accept("{", "[")
        if opened == _QUOTE:
            sink('"')
            yield from self._stream_until((_QUOTE,), lambda text: sink(escaped(text)))
            sink('"')
        elif opened and not depth:
            raise NotThis
        elif opened == "{":
            yield from self._object(sink, depth - 1)
        elif opened:
            yield from self._array(sink, depth - 1)
        else:
            yield from self._scalar_value(sink)

    def _array(self, sink: Sink, depth: int) -> Steps[None]:
        sink("[")
        between = ""
        while True:
            yield from self._space()
            if (yield from self._accept("]")):
                break
            sink(between)
            between = ", "
            yield from self._value(sink, depth)
            yield from self._space()
            if (yield from self._expect(",", "]")) == "]":
                break
        sink("]")

    def _scalar_value(self, sink: Sink) -> Steps[None]:
        parts: list[str] = []
        yield from self._run_of(_SCALAR, parts.append)
        word = "".join(parts)
        if self._closed and self._at == len(self._text):
            raise Ended
        word = _PYTHON.get(word, word)
        if not _KNOWN.fullmatch(word):
            raise NotThis
        sink(word)


PARSER = Gemma4Parser
