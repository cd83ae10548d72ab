"""DeepSeek-V3 and R1: type, name and a fenced block of JSON arguments between special tokens."""

from __future__ import annotations

from headstart.text.parsers._deepseek import CALL_BEGIN, CALL_END, CALLS_END, OPENS, SEPARATOR
from headstart.text.parsers.stream import NotThis, Steps
from headstart.text.parsers.tools import MarkedToolParser

_FENCE = "```"


class DeepSeekV3Parser(MarkedToolParser):
    """Call begin, `function`, separator, name, arguments in a fence that says json (it may lack), call end."""

    opens = OPENS
    marks = (CALL_BEGIN, "function" + SEPARATOR)

    def _call(self, opened: str) -> Steps[None]:
        yield from self._name()
        yield from self._expect(SEPARATOR)
        name = yield from self._name()
        if not (yield from self._accept(_FENCE + "json")) and (yield from self._peek()) != "{":
            raise NotThis
        self._announce(name)
        yield from self._stream_arguments("\n" + _FENCE + CALL_END, _FENCE + CALL_END, CALL_END)
        yield from self._ending(_FENCE)
        yield from self._ending(CALL_END)
        yield from self._ending(CALLS_END)


PARSER = DeepSeekV3Parser
