"""Mistral: a name and JSON arguments after `[TOOL_CALLS]`, or an array of objects (older models)."""

from headstart.text.parsers.stream import Mismatch, Steps
from headstart.text.parsers.tools import MarkedToolParser, ObjectCallParser

_OPEN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(ObjectCallParser, MarkedToolParser):
    """`[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}`, where the parts between name and object are optional (tokenizers v11 to
    v13), or `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` (v3, v7)."""

    opens = (_OPEN,)
    marks = opens

    def _call(self, opened: str) -> Steps[None]:
        yield from self._skip_space()
        if (yield from self._accept("[")):
            if (yield from self._call_list(lambda: self._read_object_call("]"))):
                yield from self._ending("]")
                yield from self._drop_strays()
                yield from self._next("]")
            return
        name = yield from self._name()
        if (yield from self._accept(_ID)):
            yield from self._name()
        if not (yield from self._accept(_ARGUMENTS)) and (yield from self._peek()) not in '{["':
            raise Mismatch
        self._announce(name)
        yield from self._stream_arguments(_OPEN)


PARSER = MistralParser
