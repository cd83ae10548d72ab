"""Harmony: reasoning is a message, which the parser of its calls finds."""

from headstart.text.parsers.harmony import START, HarmonyParser
from headstart.text.parsers.stream import Parser
from headstart.text.reasoning import ReasoningParser


class HarmonyReasoning(ReasoningParser, HarmonyParser):
    """Passes content on to the answer's parser, unless that is Harmony's own."""

    opening = START

    def __init__(self, answer: Parser | None = None, *, opened: bool = False) -> None:
        self._answer = None if isinstance(answer, HarmonyParser) else answer
        super().__init__(answer.tools if isinstance(answer, HarmonyParser) else (), opened=opened)


REASONING = HarmonyReasoning
