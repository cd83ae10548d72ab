"""Reasoning between `<think>` tags at the start of an answer; the rest goes to the answer's parser."""

from headstart.text.parsers.stream import EndOfText, Parser, Steps
from headstart.text.reasoning import ReasoningParser


class ThinkParser(ReasoningParser):
    """`opened`: the prompt ends with the opening tag; if the model repeats it, the second one is skipped.

    An opening tag later in the answer is text. Reasoning without a closing tag extends to the end of the text. One
    newline inside each tag and up to two after the closing tag are part of the format.
    """

    opening, closing = "<think>", "</think>"
    marks: tuple[str, ...] = (opening,)  # texts that all occur in the chat templates of models with this format

    def __init__(self, answer: Parser | None = None, *, opened: bool = False) -> None:
        self._answer = answer
        self._opened = opened
        super().__init__()

    def _grammar(self) -> Steps[None]:
        opens = [before + self.opening + after for before in ("", "\n") for after in ("", "\n")]
        if not (yield from self._accept(*opens)) and not self._opened:
            return
        if self._opened:
            yield from self._accept("\n")
        self._may_drop_text = True
        try:
            yield from self._stream_until((f"\n{self.closing}", self.closing), self._reasoning)
        except EndOfText:
            return
        yield from self._accept("\n\n", "\n")


REASONING = ThinkParser
