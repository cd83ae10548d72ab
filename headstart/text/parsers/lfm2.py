"""LFM2 and LFM2.5: a list of Python calls between special tokens."""

from headstart.text.parsers.pythonic import PythonCallParser
from headstart.text.parsers.stream import Steps
from headstart.text.parsers.tools import MarkedToolParser

_END = "<|tool_call_end|>"


class Lfm2Parser(PythonCallParser, MarkedToolParser):
    """`<|tool_call_start|>[f(a="b"), g()]<|tool_call_end|>`."""

    opens = ("<|tool_call_start|>",)
    ends = (_END,)
    marks = ("List of tools: ", "<|im_start|>")  # not the call markers: some templates lack them

    def _call(self, opened: str) -> Steps[None]:
        yield from self._skip_space()
        yield from self._expect("[")
        if (yield from self._call_list(self._python_call)):
            yield from self._ending("]", _END)
        else:
            yield from self._drop_leftover()


PARSER = Lfm2Parser
