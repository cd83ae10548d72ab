"""Hermes and Qwen: a JSON object for each call between `<tool_call>` tags."""

from headstart.text.parsers.stream import EndOfText, Mismatch, Steps
from headstart.text.parsers.tools import MarkedToolParser, ObjectCallParser

_END = "</tool_call>"


class HermesParser(ObjectCallParser, MarkedToolParser):
    """`<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`. The last brace and the end tag are optional.
    The tags may hold several objects or a list of them."""

    opens = ("<tool_call>",)
    marks = opens
    ends = (_END,)

    def _call(self, opened: str) -> Steps[None]:
        yield from self._skip_space()
        yield from self._accept("[")
        yield from self._skip_space()
        yield from self._read_object_call("\n" + _END, _END)
        while (yield from self._another_object()):
            self._begin_call()
            try:
                yield from self._read_object_call("\n" + _END, _END)
            except EndOfText:
                self._position = len(self._text)
                return
            except Mismatch as reason:
                self._is_announced = True  # the first call was emitted, so its text must not become content
                raise reason
        yield from self._next("]")
        yield from self._drop_strays()
        yield from self._ending(_END)


PARSER = HermesParser
