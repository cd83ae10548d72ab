"""Calls whose arguments stand one by one between tags, and become members of a JSON object."""

from __future__ import annotations

import json

from headstart.text.parsers._json_steps import escaped
from headstart.text.parsers._schema import as_json, types_of
from headstart.text.parsers.stream import Ended, Steps
from headstart.text.parsers.tools import MarkedToolParser


class MemberCalls(MarkedToolParser):
    """Builds the JSON text of the arguments. Strings stream; other values wait for their end to be converted."""

    untyped: frozenset[str]
    """The types of an argument of which the tool's schema says nothing."""

    def _member(self, function: str, key: str, ends: tuple[str, ...]) -> Steps[None]:
        """Reads a value and the one of `ends` behind it."""
        yield from self._member_of(types_of(self.tools, function, key) or self.untyped, key, ends)

    def _member_of(self, types: frozenset[str], key: str, ends: tuple[str, ...]) -> Steps[None]:
        """The same for a value of known types."""
        self._arguments((", " if self._has_arguments else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        if types == {"string"}:
            yield from self._stream_string(ends)
        else:
            yield from self._converted(types, ends)
        self._forget()

    def _stream_string(self, ends: tuple[str, ...]) -> Steps[None]:
        self._arguments('"')
        self._floating = True
        yield from self._stream_until(ends, lambda text: self._arguments(escaped(text)))
        self._floating = False
        self._arguments('"')

    def _converted(self, types: frozenset[str], ends: tuple[str, ...]) -> Steps[None]:
        parts: list[str] = []
        try:
            yield from self._stream_until(ends, parts.append)
        except Ended:
            self._arguments("".join(parts))
            raise
        self._arguments(as_json("".join(parts), types))

    def _complete(self) -> None:
        self._arguments("}" if self._has_arguments else "{}")
