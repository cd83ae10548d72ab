"""DeepSeek-V3 and R1: type, name and a fenced block of JSON arguments between special tokens."""

from headstart.text.parsers.stream import Mismatch, Steps
from headstart.text.parsers.tools import MarkedToolParser

CALL_BEGIN = "<\uff5ctool\u2581call\u2581begin\uff5c>"
CALL_END = "<\uff5ctool\u2581call\u2581end\uff5c>"
CALLS_BEGIN = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
CALLS_END = "<\uff5ctool\u2581calls\u2581end\uff5c>"
SEPARATOR = "<\uff5ctool\u2581sep\uff5c>"
OPENS = (CALLS_BEGIN + CALL_BEGIN, CALLS_BEGIN + "\n" + CALL_BEGIN, CALL_BEGIN)
"""Opening markers of a call. Bars in DeepSeek's markers are U+FF5C, spaces are U+2581."""
_FENCE = "```"


class DeepSeekV3Parser(MarkedToolParser):
    """Call begin, `function`, separator, name, arguments in an optional json fence, call end."""

    opens = OPENS
    marks = (CALL_BEGIN, "function" + SEPARATOR)
    ends = (_FENCE + CALL_END, CALL_END, CALLS_END)

    def _call(self, opened: str) -> Steps[None]:
        yield from self._name()
        yield from self._expect(SEPARATOR)
        name = yield from self._name()
        if not (yield from self._accept(_FENCE + "json")) and (yield from self._peek()) != "{":
            raise Mismatch
        self._announce(name)
        yield from self._stream_arguments("\n" + _FENCE + CALL_END, _FENCE + CALL_END, CALL_END)
        yield from self._drop_strays()
        yield from self._ending(_FENCE, CALL_END, CALLS_END)


PARSER = DeepSeekV3Parser
