"""Qwen3-Coder: function and parameters in tags. Values are strings unless the tool's schema says otherwise."""

from headstart.text.parsers._tags import TaggedArgumentsParser
from headstart.text.parsers.stream import Mismatch, Steps

_OPEN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderParser(TaggedArgumentsParser):
    """`<tool_call><function=name><parameter=k>v</parameter></function></tool_call>`, with newlines between tags.

    One newline on each side of a value is part of the format. `<tool_call>` is optional if the function is one of the
    request's tools. One of the two outer end tags is optional.
    """

    opens = (_OPEN, _FUNCTION)
    marks = opens
    ends = (_FUNCTION_END, _END)
    default_types = frozenset({"string"})

    def _call(self, opened: str) -> Steps[None]:
        if opened == _OPEN:
            yield from self._skip_space()
            yield from self._expect(_FUNCTION)
        name = yield from self._name()
        yield from self._expect(">")
        if opened == _FUNCTION and name not in self._names:
            raise Mismatch
        self._announce(name)
        end = _PARAMETER
        while end == _PARAMETER:
            yield from self._skip_space()
            end = yield from self._expect(_PARAMETER, _FUNCTION_END, _END)
            if end == _PARAMETER:
                yield from self._parameter(name)
        self._complete_arguments()
        self._drop_read_text()
        if end == _FUNCTION_END:
            yield from self._ending(_END)

    def _parameter(self, function: str) -> Steps[None]:
        key, stop = yield from self._read_until(">", "\n")
        if stop != ">":
            raise Mismatch
        yield from self._accept("\n")
        yield from self._read_member(function, key.strip(), ("\n" + _PARAMETER_END, _PARAMETER_END))


PARSER = Qwen3CoderParser
