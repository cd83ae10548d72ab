"""Formats of the reasoning before an answer, one file each. REASONING is a parser that wraps the answer's parser."""

from headstart.text.parsers.stream import Event, Parser


class ReasoningParser(Parser):
    """Base of reasoning formats. Content goes to the answer's parser, if there is one."""

    opening: str  # text at the end of a prompt after which the reasoning begins
    _answer: Parser | None

    def finish(self, *, is_cut_off: bool = False) -> list[Event]:
        events = super().finish(is_cut_off=is_cut_off)
        return events + self._answer.finish(is_cut_off=is_cut_off) if self._answer else events

    def _content(self, text: str) -> None:
        if self._answer is None:
            super()._content(text)
        else:
            self._events.extend(self._answer.push(text))
