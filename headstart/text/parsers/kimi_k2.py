"""Kimi-K2: an id that contains the function's name, and JSON arguments, between special tokens."""

import re

from headstart.text.parsers.stream import Steps
from headstart.text.parsers.tools import MarkedToolParser

_CALLS, _CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_CALL, _CALL_END, _ARGUMENTS = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
_ID = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


class KimiK2Parser(MarkedToolParser):
    """A section of calls, each: call begin, `functions.name:0`, argument begin, arguments, call end."""

    opens = (_CALLS + _CALL, _CALLS + "\n" + _CALL, _CALL)
    marks = (_CALLS, _CALL)
    ends = (_CALL_END, _CALLS_END)

    def _call(self, opened: str) -> Steps[None]:
        named = _ID.fullmatch((yield from self._name()))
        assert named is not None  # names are not empty
        yield from self._expect(_ARGUMENTS)
        self._announce(named[1])
        yield from self._stream_arguments(_CALL_END)
        yield from self._drop_strays()
        yield from self._ending(_CALL_END, _CALLS_END)


PARSER = KimiK2Parser
