"""Calls written as one JSON object with a name and arguments."""

from __future__ import annotations

from headstart.text.parsers.stream import NotThis, Steps
from headstart.text.parsers.tools import ToolParser

_ARGUMENTS = ("arguments", "parameters")


class ObjectCalls(ToolParser):
    """Reads `{"name": ..., "arguments": {...}}`, its members in any order; other members are skipped.

    Arguments that come before the name wait for it. A call without arguments has `{}`.
    """

    members: frozenset[str] | None = None
    """The only members that a call may have; None allows all."""
    named_first = True
    """A name alone makes a call: it is announced before the arguments are seen."""

    def _object_call(self, *ends: str) -> Steps[None]:
        """`ends`: where malformed arguments end. The closing brace may lack there."""
        yield from self._expect("{")
        name, early = "", ""
        while True:
            key = yield from self._key()
            if key == "name":
                name = self._known((yield from self._json_string()))
                if early or self.named_first:
                    self._announce(name)
                    self._arguments(early)
            elif key in _ARGUMENTS and name and not self._has_arguments:
                if not self._announced:
                    self._announce(name)
                yield from self._stream_arguments(*ends)
            elif key in _ARGUMENTS and not name:
                early = yield from self._json_text()
            else:
                yield from self._json_text()
            yield from self._space()
            if not (yield from self._accept(",")):
                break
        if not self._announced:
            raise NotThis
        if self._has_arguments:
            yield from self._accept("}")
        else:
            yield from self._expect("}")
        self._complete()
        self._forget()

    def _key(self) -> Steps[str]:
        yield from self._space()
        key = yield from self._json_string()
        yield from self._space()
        yield from self._expect(":")
        yield from self._space()
        if self.members is not None and key not in self.members:
            raise NotThis
        return key

    def _known(self, name: str) -> str:
        if not name or self._announced:
            raise NotThis
        return name
