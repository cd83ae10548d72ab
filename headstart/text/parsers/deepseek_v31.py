"""DeepSeek-V3.1: a name and JSON arguments between special tokens."""

from headstart.text.parsers.deepseek_v3 import CALL_BEGIN, CALL_END, CALLS_END, OPENS, SEPARATOR
from headstart.text.parsers.stream import Steps
from headstart.text.parsers.tools import MarkedToolParser


class DeepSeekV31Parser(MarkedToolParser):
    """Calls begin, then each call (call begin, name, separator, arguments, call end), then calls end."""

    opens = OPENS
    marks = (CALL_BEGIN,)
    ends = (CALL_END, CALLS_END)

    def _call(self, opened: str) -> Steps[None]:
        name = yield from self._name()
        yield from self._expect(SEPARATOR)
        self._announce(name)
        yield from self._stream_arguments(CALL_END)
        yield from self._drop_strays()
        yield from self._ending(CALL_END, CALLS_END)


PARSER = DeepSeekV31Parser
