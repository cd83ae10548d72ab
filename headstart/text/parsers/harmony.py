"""Harmony (gpt-oss): messages on channels. `analysis` is reasoning, messages to functions are calls, others content."""

import re

from headstart.text.parsers.stream import EndOfText, Mismatch, Steps
from headstart.text.parsers.tools import MarkedToolParser, Tools

START, CHANNEL, MESSAGE = "<|start|>assistant", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
_BEGIN = "<|start|>"
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT = re.compile(r"(?:^|\s)to=functions\.([\w.-]+)")
_OTHER_RECIPIENT = re.compile(r"(?:^|\s)to=(?!assistant\b)")


class HarmonyParser(MarkedToolParser):
    """`<|channel|>analysis<|message|>...<|end|>`, `<|start|>assistant<|channel|>commentary to=functions.f
    <|constrain|>json<|message|>{...}<|call|>`, `<|start|>assistant<|channel|>final<|message|>...<|return|>`. The
    recipient may also precede the channel. A message to a recipient that is no function is content, as written."""

    opens = (START, CHANNEL)
    marks = ("<|channel|>analysis<|message|>", START)

    def __init__(self, tools: Tools = (), *, opened: bool = True) -> None:
        self._opened = opened  # the prompt ends inside a message
        super().__init__(tools)

    def _grammar(self) -> Steps[None]:
        if self._opened and (yield from self._accept(" to=")):
            self._position = 0
            try:
                yield from self._message("")
            except Mismatch as reason:
                self._abort_call(reason)
        yield from super()._grammar()

    def _call(self, opened: str) -> Steps[None]:
        yield from self._message(CHANNEL if opened == CHANNEL else "")

    def _message(self, begun: str) -> Steps[None]:
        """Read a message. Begins after its opening marker, ends after its end marker. `begun`: the header so far."""
        header, stop = yield from self._read_until(MESSAGE, _BEGIN, *ENDS)
        header = begun + header
        if stop != MESSAGE:
            raise Mismatch
        if called := _RECIPIENT.search(header.replace(CHANNEL, " ")):
            self._announce(called[1])
            yield from self._stream_arguments(*ENDS, _BEGIN)
            yield from self._closing()
            return
        channels = _CHANNEL.findall(header)
        if not channels or _OTHER_RECIPIENT.search(header.replace(CHANNEL, " ")):
            raise Mismatch
        self._drop_read_text()
        self._is_announced = self._has_arguments = True  # the text read so far was emitted
        sink = self._reasoning if channels[-1] == "analysis" else self._content
        self._may_drop_text = True
        try:
            stop = yield from self._stream_until((_BEGIN, *ENDS), sink)
        except EndOfText:
            self._may_drop_text = False
            return
        self._may_drop_text = False
        if stop == _BEGIN:
            self._position -= len(stop)
        self._drop_read_text()

    def _closing(self) -> Steps[None]:
        yield from self._drop_strays()
        yield from self._skip_space()
        taken = yield from self._accept(*ENDS)
        rest = self._text[self._position :]
        if not taken and self._is_closed and any(end.startswith(rest) for end in ENDS):
            self._position = len(self._text)
        self._drop_read_text()


PARSER = HarmonyParser
