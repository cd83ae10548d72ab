"""MiniMax-M2: functions and parameters in tags. Values are JSON unless the tool's schema says string."""

from headstart.text.parsers._tags import ANY, InvokeParser


class MiniMaxM2Parser(InvokeParser):
    """`<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke></minimax:tool_call>`."""

    blocks = ("minimax:tool_call",)
    marks = ("<minimax:tool_call>", "<invoke name=")
    default_types = frozenset({ANY})


PARSER = MiniMaxM2Parser
