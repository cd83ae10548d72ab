"""Qwen3-Coder: function and parameters in tags; values are strings unless the tool's schema says otherwise."""

from __future__ import annotations

from headstart.text.parsers._members import MemberCalls
from headstart.text.parsers.stream import NotThis, Steps

_OPEN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderParser(MemberCalls):
    """`<tool_call><function=name><parameter=k>v</parameter></function></tool_call>`, with newlines between tags.

    One newline on each side of a value belongs to the format. `<tool_call>` may lack when the function is one of the
    request's tools, and the end of one of the two outer tags may lack.
    """

    opens = (_OPEN, _FUNCTION)
    marks = opens
    untyped = frozenset({"string"})

    def _call(self, opened: str) -> Steps[None]:
        if opened == _OPEN:
            yield from self._space()
            yield from self._expect(_FUNCTION)
        name = yield from self._name()
        yield from self._expect(">")
        if opened == _FUNCTION and name not in self._names:
            raise NotThis
        self._announce(name)
        end = _PARAMETER
        while end == _PARAMETER:
            yield from self._space()
            end = yield from self._expect(_PARAMETER, _FUNCTION_END, _END)
            if end == _PARAMETER:
                yield from self._parameter(name)
        self._complete()
        self._forget()
        if end == _FUNCTION_END:
            yield from self._ending(_END)

    def _parameter(self, function: str) -> Steps[None]:
        key, stop = yield from self._until(">", "\n")
        if stop != ">":
            raise NotThis
        yield from self._accept("\n")
        yield from self._member(function, key.strip(), ("\n" + _PARAMETER_END, _PARAMETER_END))


PARSER = Qwen3CoderParser
