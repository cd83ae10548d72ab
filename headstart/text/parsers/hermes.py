"""Hermes and Qwen: a JSON object for each call between `<tool_call>` tags."""

from headstart.text.parsers.json import JsonParser
from headstart.text.parsers.stream import EndOfText, Mismatch, Steps
from headstart.text.parsers.tools import MarkedToolParser

_END = "</tool_call>"


class HermesParser(MarkedToolParser, JsonParser):
    """`<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`. The last brace and the end tag are optional.
    The tags may hold several objects or a list of them. At the beginning of an answer, calls of the request's tools may
    lack the tags: Qwen2.5-Coder writes plain JSON, or a Markdown fence."""

    opens = ("<tool_call>",)
    marks = opens
    ends = (_END,)

    def _grammar(self) -> Steps[None]:
        if self._names:
            yield from JsonParser._grammar(self)
        self.is_strict = False  # between tags
        yield from MarkedToolParser._grammar(self)

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
