"""Harmony (gpt-oss): messages on channels. Thoughts are on `analysis`, calls have a recipient, the rest is content."""

from __future__ import annotations

import re

from headstart.text.parsers.events import Reasoning
from headstart.text.parsers.stream import Ended, NotThis, Steps
from headstart.text.parsers.tools import MarkedToolParser, Tools

START, CHANNEL, MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_BEGIN = "<|start|>"
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT = re.compile(r"(?:^|\s)to=functions\.([\w.-]+)")
_ELSEWHERE = re.compile(r"(?:^|\s)to=(?!assistant\b)")


class HarmonyParser(MarkedToolParser):
    """`<|channel|>analysis<|message|>...<|end|>`, `<|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{...}<|call|>`, `<|start|>assistant<|channel|>final<|message|>...<|return|>`; a
    recipient may also stand before the channel. What has another recipient is content, as it is written."""

    opens = (START, CHANNEL)
    marks = ("<|channel|>analysis<|message|>", START)

    def __init__(self, tools: Tools = (), *, opened: bool = True) -> None:
        self._opened = opened  # the prompt has begun a message
        super().__init__(tools)

    def _grammar(self) -> Steps[None]:
        if self._opened and (yield from self._accept(" to=")):
            self._at = 0
            try:
                yield from self._message("")
            except NotThis as reason:
                self._stop_call(reason)
        yield from super()._grammar()

    def _call(self, opened: str) -> Steps[None]:
        yield from self._message(CHANNEL if opened == CHANNEL else "")

    def _message(self, begun: str) -> Steps[None]:
        """From behind what opened it, of which `begun` is the header's, to behind its end."""
        header, stop = yield from self._until(MESSAGE, _BEGIN, *ENDS)
        header = begun + header
        if stop != MESSAGE:
            raise NotThis
        if called := _RECIPIENT.search(header.replace(CHANNEL, " ")):
            self._announce(called[1])
            yield from self._stream_arguments(*ENDS, _BEGIN)
            yield from self._closing()
            return
        channels = _CHANNEL.findall(header)
        if not channels or _ELSEWHERE.search(header.replace(CHANNEL, " ")):
            raise NotThis
        self._forget()
        self._announced = self._has_arguments = True  # what was read of it is given out
        sink = self._thought if channels[-1] == "analysis" else self._content
        self._floating = True
        try:
            stop = yield from self._stream_until((_BEGIN, *ENDS), sink)
        except Ended:
            self._floating = False
            return
        self._floating = False
        if stop == _BEGIN:
            self._at -= len(stop)
        self._forget()

    def _closing(self) -> Steps[None]:
        yield from self._space()
        taken = yield from self._accept(*ENDS)
        rest = self._text[self._at :]
        if not taken and self._closed and any(end.startswith(rest) for end in ENDS):
            self._at = len(self._text)
        self._forget()

    def _thought(self, text: str) -> None:
        self._events.append(Reasoning(text))


PARSER = HarmonyParser
