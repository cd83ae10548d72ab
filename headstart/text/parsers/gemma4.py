"""Gemma 4: a name and an object with unquoted keys, whose strings have special tokens in place of quotes."""

import json

from headstart.text.parsers.stream import MAX_NESTING, Mismatch, Sink, Steps, escape_json
from headstart.text.parsers.tools import MarkedToolParser

_END, _QUOTE = "<tool_call|>", '<|"|>'


class Gemma4Parser(MarkedToolParser):
    """`<|tool_call>call:name{key:<|"|>text<|"|>,n:1,list:[...],object:{...}}<tool_call|>`; converted to JSON."""

    opens = ("<|tool_call>call:",)
    marks = ("<|tool_call>", _END)
    ends = (_END,)

    def _call(self, opened: str) -> Steps[None]:
        name = yield from self._name()
        yield from self._expect("{")
        self._announce(name)
        yield from self._object(self._arguments, MAX_NESTING)
        self._drop_read_text()
        yield from self._drop_strays()
        yield from self._ending(_END)

    def _object(self, sink: Sink, depth: int) -> Steps[None]:
        """Read an object after its opening brace, and emit it as JSON."""

        def read_member(separator: str) -> Steps[None]:
            key = yield from self._read_key()
            sink(separator + json.dumps(key, ensure_ascii=False) + ": ")
            yield from self._value(sink, depth)

        yield from self._items("{}", "}", sink, read_member)

    def _read_key(self) -> Steps[str]:
        if (yield from self._accept(_QUOTE)):
            key, _ = yield from self._read_until(_QUOTE)
            yield from self._skip_space()
            yield from self._expect(":")
            return key
        key, stop = yield from self._read_until(":", "}", _QUOTE)
        if stop != ":":
            raise Mismatch
        return key.strip()

    def _value(self, sink: Sink, depth: int) -> Steps[None]:
        yield from self._skip_space()
        opened = yield from self._accept(_QUOTE, "{", "[")
        if opened == _QUOTE:
            sink('"')
            yield from self._stream_until((_QUOTE,), lambda text: sink(escape_json(text)))
            sink('"')
        elif opened and not depth:
            sink("null")
            raise Mismatch
        elif opened == "{":
            yield from self._object(sink, depth - 1)
        elif opened:
            yield from self._items("[]", "]", sink, lambda separator: self._element(separator, sink, depth - 1))
        else:
            yield from self._word(sink, _QUOTE)

    def _element(self, separator: str, sink: Sink, depth: int) -> Steps[None]:
        sink(separator)
        yield from self._value(sink, depth)


PARSER = Gemma4Parser
