"""Reasoning between `<think>` tags at the start of an answer; the rest goes to another parser, if there is one."""

from __future__ import annotations

from headstart.text.parsers.events import Event, Reasoning
from headstart.text.parsers.stream import Ended, Parser, Steps, StreamParser


class ThinkParser(StreamParser):
    """`opened`: the chat template has already written the opening tag; one that the model repeats is skipped.

    An opening tag anywhere but at the start is text. Reasoning without an end goes to the end of the text. One newline
    inside each tag and up to two behind the closing one belong to the format.
    """

    opening, closing = "<think>", "</think>"
    marks: tuple[str, ...] = (opening,)
    """Texts that all stand in the chat templates of models with this format."""

    def __init__(self, answer: Parser | None = None, *, opened: bool = False) -> None:
        self._answer = answer
        self._opened = opened
        super().__init__()

    def finish(self) -> list[Event]:
        events = super().finish()
        return events + self._answer.finish() if self._answer else events

    def _content(self, text: str) -> None:
        if self._answer is None:
            super()._content(text)
        else:
            self._events.extend(self._answer.push(text))

    def _grammar(self) -> Steps[None]:
        opens = [before + self.opening + after for before in ("", "\n") for after in ("", "\n")]
        if not (yield from self._accept(*opens)) and not self._opened:
            return
        if self._opened:
            yield from self._accept("\n")
        self._floating = True
        try:
            yield from self._stream_until((f"\n{self.closing}", self.closing), self._reasoning)
        except Ended:
            return
        yield from self._accept("\n\n", "\n")

    def _reasoning(self, text: str) -> None:
        self._events.append(Reasoning(text))


REASONING = ThinkParser
