"""MiniMax-M2: functions and parameters in tags; values that the schema does not call strings are JSON."""

from __future__ import annotations

from headstart.text.parsers._invoke import InvokeCalls
from headstart.text.parsers._schema import ANY


class MiniMaxM2Parser(InvokeCalls):
    """`<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke></minimax:tool_call>`."""

    blocks = ("minimax:tool_call",)
    marks = ("<minimax:tool_call>", "<invoke name=")
    untyped = frozenset({ANY})


PARSER = MiniMaxM2Parser
