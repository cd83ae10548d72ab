"""Harmony: reasoning is a message on its own channel, which the parser of tool calls already recognizes."""

from headstart.text.parsers.harmony import START, HarmonyParser
from headstart.text.parsers.stream import Parser
from headstart.text.reasoning import ReasoningParser


class HarmonyReasoning(ReasoningParser, HarmonyParser):
    """Passes content to the answer's parser. If that is Harmony's parser, this class replaces it."""

    opening = START

    def __init__(self, answer: Parser | None = None, *, opened: bool = False) -> None:
        self._answer = None if isinstance(answer, HarmonyParser) else answer
        super().__init__(answer.tools if isinstance(answer, HarmonyParser) else (), opened=opened)


REASONING = HarmonyReasoning
