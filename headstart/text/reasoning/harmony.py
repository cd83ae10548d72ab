"""Harmony's thoughts stand among its messages: the parser of its calls finds them."""

from __future__ import annotations

from headstart.text.parsers.events import Event
from headstart.text.parsers.harmony import START, HarmonyParser
from headstart.text.parsers.stream import Parser


class HarmonyReasoning(HarmonyParser):
    """What is content goes to the answer's parser, if that is another format's."""

    opening = START

    def __init__(self, answer: Parser | None = None, *, opened: bool = False) -> None:
        self._answer = None if isinstance(answer, HarmonyParser) else answer
        super().__init__(answer.tools if isinstance(answer, HarmonyParser) else (), opened=opened)

    def finish(self) -> list[Event]:
        events = super().finish()
        return events + self._answer.finish() if self._answer else events

    def _content(self, text: str) -> None:
        if self._answer is None:
            super()._content(text)
        else:
            self._events.extend(self._answer.push(text))


REASONING = HarmonyReasoning
