"""GLM-4.5 and later: a name, then keys and values in tags; values that the schema does not call strings are JSON."""

from __future__ import annotations

from headstart.text.parsers._members import MemberCalls
from headstart.text.parsers._schema import ANY
from headstart.text.parsers.stream import Steps

_END, _KEY = "</tool_call>", "<arg_key>"


class Glm45Parser(MemberCalls):
    """`<tool_call>name\\n<arg_key>k</arg_key>\\n<arg_value>v</arg_value>\\n</tool_call>`; newlines may lack."""

    opens = ("<tool_call>",)
    marks = (*opens, _KEY)
    untyped = frozenset({ANY})

    def _call(self, opened: str) -> Steps[None]:
        name = yield from self._name()
        follows = yield from self._expect(_KEY, _END)
        self._at -= len(follows)
        self._announce(name)
        while (yield from self._expect(_KEY, _END)) == _KEY:
            key, _ = yield from self._until("</arg_key>")
            yield from self._space()
            yield from self._expect("<arg_value>")
            yield from self._member(name, key.strip(), ("</arg_value>",))
            yield from self._space()
        self._complete()
        self._forget()


PARSER = Glm45Parser
