"""Mistral: a name and JSON arguments behind `[TOOL_CALLS]`, or, in older models, an array of objects."""

from __future__ import annotations

from headstart.text.parsers._objects import ObjectCalls
from headstart.text.parsers.stream import NotThis, Steps
from headstart.text.parsers.tools import MarkedToolParser

_OPEN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(ObjectCalls, MarkedToolParser):
    """`[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, where what stands between name and object may lack (tokenizers v11 to
    v13), or `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` (v3, v7)."""

    opens = (_OPEN,)
    marks = opens

    def _call(self, opened: str) -> Steps[None]:
        yield from self._space()
        if (yield from self._accept("[")):
            yield from self._array()
            return
        name = yield from self._name()
        if (yield from self._accept(_ID)):
            yield from self._name()
        if not (yield from self._accept(_ARGUMENTS)) and (yield from self._peek()) != "{":
            raise NotThis
        self._announce(name)
        yield from self._stream_arguments(_OPEN)

    def _array(self) -> Steps[None]:
        first = True
        while True:
            yield from self._space()
            try:
                yield from self._object_call("]")
            except NotThis as reason:
                if first:
                    raise
                self._stop_call(reason)
                return
            first = False
            yield from self._space()
            if not (yield from self._accept(",")):
                break
            self._begin_call()
        yield from self._ending("]")


PARSER = MistralParser
