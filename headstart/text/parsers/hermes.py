"""Hermes, and the Qwen models that took its format: a JSON object for each call between `<tool_call>` tags."""

from __future__ import annotations

from headstart.text.parsers._objects import ObjectCalls
from headstart.text.parsers.stream import Steps
from headstart.text.parsers.tools import MarkedToolParser

_END = "</tool_call>"


class HermesParser(ObjectCalls, MarkedToolParser):
    """`<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`; the last brace and the end tag may lack."""

    opens = ("<tool_call>",)
    marks = opens

    def _call(self, opened: str) -> Steps[None]:
        yield from self._space()
        yield from self._object_call("\n" + _END, _END)
        yield from self._ending(_END)


PARSER = HermesParser
