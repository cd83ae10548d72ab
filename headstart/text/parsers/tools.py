"""Base classes of tool formats, with one treatment of calls that are cut off or malformed.

- Until its name is announced, a call that does not match its format is content, exactly as written. A call after an
  opening marker or another call is dropped instead if the maximum length cuts it off there.
- After that, arguments that are cut off by the end of the text stay an incomplete JSON text.
- Otherwise the arguments of an announced call become one JSON object. Malformed JSON is completed, and its rest dropped
  up to the call's end marker. A value that is not an object is converted (`argument_objects`).
- Text after complete arguments is content, except for closing brackets and end markers, which are dropped.
One newline before a call's opening marker belongs to the format, not to the content.
"""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from headstart.text.parsers.stream import (
    Arguments,
    EndOfText,
    Event,
    JsonValueParser,
    Mismatch,
    Sink,
    Steps,
    ToolCall,
    word_as_json,
)

Tools: TypeAlias = Sequence[Mapping[str, Any]]  # the `tools` of an OpenAI request

_ARGUMENTS = ("arguments", "parameters")
_MEMBERS = ("name", *_ARGUMENTS, "type", "id")
_NAME = re.compile(r"[\w.:/$@-]*")


def argument_objects(text: str) -> list[str]:
    """JSON texts of argument objects, one for each call, from a call's argument text. null and "" become {}; a JSON
    string is parsed again; a list has the arguments of several calls. Anything else gets the key `INVALID_JSON`."""
    try:
        value = _load(text) if text.strip() else None
        for _ in range(2):  # models escape objects once or twice
            if isinstance(value, str):
                value = _load(value) if value.strip() else None
        if value is None or value == []:
            value = {}
        listed = value if isinstance(value, list) else [value]
        if all(isinstance(each, dict) for each in listed):
            return [json.dumps(each, ensure_ascii=False, allow_nan=False) for each in listed]
    except (ValueError, RecursionError):
        pass
    return [json.dumps({"INVALID_JSON": text}, ensure_ascii=False)]


def _load(text: str) -> Any:
    return json.loads(text, strict=False)


class ToolParser(JsonValueParser):
    """Base of tool formats: emits the calls of one answer. `tools`: the request's tools."""

    opens: tuple[str, ...] = ()  # opening markers of a call
    ends: tuple[str, ...] = ()  # markers at the end of a call, or of all calls
    strays: tuple[str, ...] = ("}",)  # surplus closing brackets after a call, which are dropped

    marks: tuple[str, ...] = ()
    """Texts that all occur in the chat templates of models with this format; empty: templates do not identify it."""
    writes_json: ClassVar[bool] = False
    """Whether the parser writes the JSON object of the arguments itself, member by member, as calls are not in JSON."""

    one_call = False  # further calls of an answer are dropped (`parallel_tool_calls: false`)

    def __init__(self, tools: Tools = ()) -> None:
        self.tools = tools
        self._num_calls = 0
        self._called = ""  # name of the current call
        self._is_announced = False  # the name of the current call was emitted
        self._has_arguments = False
        super().__init__()

    @property
    def _names(self) -> set[str]:
        return {tool["function"]["name"] for tool in self.tools if tool.get("type", "function") == "function"}

    def _pop_events(self) -> list[Event]:
        events = super()._pop_events()
        return [each for each in events if getattr(each, "index", 0) == 0] if self.one_call else events

    def _begin_call(self) -> None:
        self._drop_read_text()
        self._is_announced = self._has_arguments = False

    def _announce(self, name: str) -> None:
        self._events.append(ToolCall(self._num_calls, name))
        self._num_calls += 1
        self._is_announced, self._called = True, name
        self._drop_read_text()

    def _arguments(self, text: str) -> None:
        self._has_arguments = self._has_arguments or bool(text)
        self._events.append(Arguments(self._num_calls - 1, text))

    def _complete_arguments(self) -> None:
        """Emit the end of the call's arguments."""
        if not self._has_arguments:
            self._arguments("{}")
        elif self.writes_json:
            self._arguments("}")

    def _begin_member(self, key: str) -> None:
        """With `writes_json`: emit the text before the value of an argument."""
        self._arguments((", " if self._has_arguments else "{") + json.dumps(key, ensure_ascii=False) + ": ")

    def _abort_call(self, reason: Mismatch, opened: str = "") -> None:
        """Handle a call that does not match its format. Not announced: `opened` becomes content, and the call's text is
        read again as content. Cut off: drop the rest. Malformed: complete the arguments."""
        self._may_drop_text = False
        is_certain = bool(opened or self._num_calls)  # the text was certainly going to be a call
        if isinstance(reason, EndOfText) if self._is_announced else is_certain and self._is_cut_off:
            self._position = len(self._text)
        elif not self._is_announced:
            self._content(opened)
            self._position = 0
        else:
            self._complete_arguments()
            self._position = 0

    def _stream_arguments(self, *ends: str) -> Steps[None]:
        """Read and emit a call's arguments. With `ends`, further objects are further calls of the same function.
        `ends`: markers up to which malformed arguments are dropped."""
        yield from self._skip_space()
        stops = (*ends, *self.opens)
        while True:
            self._may_drop_text = True
            try:
                if (yield from self._peek()) == "{":
                    yield from self._json_value(self._arguments)
                else:
                    self._emit_arguments((yield from self._json_text()))
            except EndOfText:
                raise
            except Mismatch:
                yield from self._malformed_arguments(stops)
            self._may_drop_text = False
            self._drop_read_text()
            if not ends or not (yield from self._next("{")):
                break
            self._position -= 1
            self._has_arguments = False
            self._announce(self._called)

    def _malformed_arguments(self, stops: Sequence[str]) -> Steps[None]:
        """Skip malformed arguments up to one of `stops`. If none were emitted, convert and emit the skipped text."""
        rest: list[str] = []
        try:
            end = yield from self._stream_until(stops, rest.append)
            self._position -= len(end)
        except EndOfText:
            end = ""
        if not self._has_arguments:
            self._emit_arguments("".join(rest) or "null")

    def _emit_arguments(self, text: str) -> None:
        """Emit complete arguments, unless `text` is empty. A list of them becomes several calls of the function."""
        for number, each in enumerate(argument_objects(text) if text else ()):
            if number:
                self._announce(self._called)
            self._arguments(each)

    def _items(self, brackets: str, end: str, sink: Sink, read_item: Callable[[str], Steps[None]]) -> Steps[None]:
        """Read items separated by commas, up to `end`, and emit them between `brackets`; the second one also after a
        Mismatch. read_item: reads and emits an item, after the separator in its argument."""
        sink(brackets[0])
        separator = ""
        try:
            while True:
                yield from self._skip_space()
                if (yield from self._accept(end)):
                    break
                yield from read_item(separator)
                separator = ", "
                yield from self._skip_space()
                if (yield from self._expect(",", end)) == end:
                    break
        except EndOfText:
            raise
        except Mismatch:
            sink(brackets[1])
            raise
        sink(brackets[1])

    def _word(self, sink: Sink, opening: str = "") -> Steps[None]:
        """Read a constant, a number or another word, and emit it as JSON. Raises EndOfText if the text ends with it, or
        with a prefix of `opening` after it."""
        word = yield from self._read_word()
        if self._is_closed and opening.startswith(self._text[self._position :]):
            raise EndOfText
        if not word:
            sink("null")
            raise Mismatch
        sink(word_as_json(word))

    def _call_list(self, read_call: Callable[[], Steps[None]]) -> Steps[bool]:
        """Read calls separated by commas. Returns False if a call after the first was malformed."""
        is_first = True
        while True:
            yield from self._skip_space()
            try:
                yield from read_call()
            except Mismatch as reason:
                if is_first:
                    raise
                self._abort_call(reason)
                return False
            is_first = False
            yield from self._skip_space()
            if not (yield from self._accept(",")):
                return True
            self._begin_call()

    def _next(self, *literals: str) -> Steps[str]:
        """Read white space and one of `literals`; returns it. If none follows, reads nothing and returns ""."""
        start = self._position
        yield from self._skip_space()
        found = yield from self._accept(*literals)
        if not found:
            self._position = start
        return found

    def _drop_strays(self) -> Steps[None]:
        while (yield from self._next(*self.strays)):
            self._drop_read_text()

    def _name(self) -> Steps[str]:
        """Read a function's name with the white space around it; returns the name."""
        yield from self._skip_space()
        parts: list[str] = []
        yield from self._read_run(_NAME, parts.append)
        if not parts[0]:
            raise Mismatch
        yield from self._skip_space()
        return "".join(parts)


class MarkedToolParser(ToolParser):
    """A format with calls between markers, and content around them."""

    @abstractmethod
    def _call(self, opened: str) -> Steps[None]:
        """Read one call. Begins after its opening marker `opened`, ends after its end marker."""

    def _grammar(self) -> Steps[None]:
        while True:
            self._may_drop_text = True
            marks = (*self.opens, *(self.ends if self._num_calls else ()))
            try:
                opened = yield from self._stream_until([*marks, *("\n" + each for each in marks)], self._content)
            except EndOfText:
                return
            self._may_drop_text = False
            self._begin_call()
            if opened.lstrip("\n") in self.ends:
                continue  # an end marker that a malformed call has left
            try:
                yield from self._call(opened.lstrip("\n"))
                yield from self._drop_strays()
            except Mismatch as reason:
                is_broken = self._is_announced and not isinstance(reason, EndOfText)
                self._abort_call(reason, opened)
                if is_broken:
                    yield from self._drop_leftover()

    def _drop_leftover(self) -> Steps[None]:
        """Drop the text up to the end marker of a malformed call. Without an end marker the text is content."""
        parts: list[str] = []
        try:
            stop = yield from self._stream_until((*self.ends, *self.opens), parts.append)
        except EndOfText:
            stop = ""
        if stop not in self.ends or not stop:
            self._content("".join(parts))
            self._position -= len(stop)
        self._drop_read_text()


class ObjectCallParser(ToolParser):
    """Calls written as `{"name": ..., "arguments": {...}}`, with members in any order; other members are skipped.

    Arguments before the name are emitted after it. A call without arguments gets `{}`.
    """

    is_strict = False
    """Whether a call needs arguments, may have no members except `_MEMBERS`, and must name one of the request's tools
    if there are any. Without markers any JSON answer could look like a call."""

    def _read_object_call(self, *ends: str) -> Steps[None]:
        """Read an object and emit its call. `ends`: markers after malformed arguments. The last brace is optional, and
        the first one may be doubled."""
        yield from self._expect("{{", "{")
        name, early = "", ""
        while True:
            key = yield from self._read_key()
            if key == "name":
                name = self._check_name((yield from self._json_string()))
                if early or not self.is_strict:
                    self._announce(name)
                    self._emit_arguments(early)
            elif key in _ARGUMENTS and name and not self._has_arguments:
                if not self._is_announced:
                    self._announce(name)
                yield from self._stream_arguments(*ends)
            elif key in _ARGUMENTS and not name:
                early = yield from self._json_text()
            else:
                yield from self._json_text()
            yield from self._skip_space()
            if not (yield from self._accept(",")):
                break
        if not self._is_announced:
            raise Mismatch
        if self._has_arguments:
            yield from self._accept("}")
        else:
            yield from self._expect("}")
        self._complete_arguments()
        self._drop_read_text()
        yield from self._drop_strays()

    def _another_object(self) -> Steps[bool]:
        """Whether another object follows, perhaps after a separator. Reads up to its opening brace."""
        start = self._position
        yield from self._next(",", ";")
        found = yield from self._next("{")
        self._position = self._position - 1 if found else start
        return bool(found)

    def _read_key(self) -> Steps[str]:
        yield from self._skip_space()
        key = yield from self._json_string()
        yield from self._skip_space()
        yield from self._expect(":")
        yield from self._skip_space()
        if self.is_strict and key not in _MEMBERS:
            raise Mismatch
        return key

    def _check_name(self, name: str) -> str:
        if not name or self._is_announced or (self.is_strict and self._names and name not in self._names):
            raise Mismatch
        return name
