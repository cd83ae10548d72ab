"""What the tool formats share: calls among content, and what becomes of a call that is cut off or malformed.

- Before its name is announced, a call that does not fit its format is content, exactly as written.
- After that, arguments that end with the text stay as they are: a JSON text without its end.
- After that, JSON arguments that are malformed go on as written up to the call's end marker.
- Text behind complete arguments that is no end marker is content.
One newline before a call's opening marker belongs to the format and is no content.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from headstart.text.parsers._json_steps import JsonSteps
from headstart.text.parsers.events import Arguments, ToolCall
from headstart.text.parsers.stream import Ended, NotThis, Steps

Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""The `tools` of a request, as OpenAI has them."""

_NAME = re.compile(r"[\w.:/$@-]*")


class ToolParser(JsonSteps):
    """State of the calls of one answer."""

    marks: tuple[str, ...] = ()
    """Texts that all stand in the chat templates of models with this format; none: it cannot be told so."""

    def __init__(self, tools: Tools = ()) -> None:
        self.tools = tools
        self._num_calls = 0
        self._announced = False  # the call in progress has a name that was given out
        self._has_arguments = False
        super().__init__()

    @property
    def _names(self) -> set[str]:
        return {tool["function"]["name"] for tool in self.tools if tool.get("type", "function") == "function"}

    def _begin_call(self) -> None:
        self._forget()
        self._announced = self._has_arguments = False

    def _announce(self, name: str) -> None:
        self._events.append(ToolCall(self._num_calls, name))
        self._num_calls += 1
        self._announced = True
        self._forget()

    def _arguments(self, text: str) -> None:
        self._has_arguments = self._has_arguments or bool(text)
        self._events.append(Arguments(self._num_calls - 1, text))

    def _complete(self) -> None:
        """Nothing more comes for this call's arguments."""
        if not self._has_arguments:
            self._arguments("{}")

    def _stop_call(self, reason: NotThis, opened: str = "") -> None:
        """The call does not go on as its format says: go back to what was neither given out nor understood."""
        self._floating = False
        if not self._announced:
            self._content(opened)
            self._at = 0
        elif isinstance(reason, Ended):
            self._at = len(self._text)
        else:
            self._complete()
            self._at = 0

    def _stream_arguments(self, *ends: str) -> Steps[None]:
        """One JSON value. What is malformed goes on as written up to one of `ends`, or to the end of the text."""
        yield from self._space()
        self._floating = True
        try:
            yield from self._json_value(self._arguments)
        except Ended:
            raise
        except NotThis:
            end = yield from self._stream_until(ends, self._arguments)
            self._at -= len(end)
            self._complete()
        self._floating = False
        self._forget()

    def _name(self) -> Steps[str]:
        """A function's name and the white space around it."""
        yield from self._space()
        parts: list[str] = []
        yield from self._run_of(_NAME, parts.append)
        if not parts[0]:
            raise NotThis
        yield from self._space()
        return "".join(parts)


class MarkedToolParser(ToolParser):
    """Formats whose calls stand between markers, with content around them."""

    opens: tuple[str, ...]

    @abstractmethod
    def _call(self, opened: str) -> Steps[None]:
        """Reads one call, from behind its opening marker to behind its end marker."""

    def _grammar(self) -> Steps[None]:
        opens = [before + marker for before in ("\n", "") for marker in self.opens]
        while True:
            self._floating = True
            try:
                opened = yield from self._stream_until(opens, self._content)
            except Ended:
                return
            self._floating = False
            self._begin_call()
            try:
                yield from self._call(opened.lstrip("\n"))
            except NotThis as reason:
                self._stop_call(reason, opened)
