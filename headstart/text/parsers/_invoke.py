"""Calls as tags with names: an invocation, and in it parameters."""

from __future__ import annotations

from typing import ClassVar

from headstart.text.parsers._members import MemberCalls
from headstart.text.parsers.stream import NotThis, Steps


class InvokeCalls(MemberCalls):
    """`<BLOCK><invoke name="f"><parameter name="k">v</parameter></invoke></BLOCK>`, with newlines between tags.

    `bar` stands before the name of every tag, `blocks` are names of the outer one.
    """

    bar: ClassVar[str] = ""
    blocks: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        outer, inner = [f"<{cls.bar}{block}>" for block in cls.blocks], f'<{cls.bar}invoke name="'
        cls.opens = (*(block + gap + inner for block in outer for gap in ("\n", "")), inner)

    def _call(self, opened: str) -> Steps[None]:
        name, stop = yield from self._until('"', "\n")
        if stop != '"' or not name:
            raise NotThis
        yield from self._expect(">")
        self._announce(name)
        parameter, end = f'<{self.bar}parameter name="', f"</{self.bar}invoke>"
        while True:
            yield from self._space()
            if (yield from self._expect(parameter, end)) == end:
                break
            key, _ = yield from self._until('"')
            yield from self._value(name, key, f"</{self.bar}parameter>")
        self._complete()
        self._forget()
        for block in self.blocks:
            yield from self._ending(f"</{self.bar}{block}>")

    def _value(self, function: str, key: str, end: str) -> Steps[None]:
        """From behind the quote of the parameter's name to behind its end."""
        yield from self._expect(">")
        yield from self._member(function, key, (end,))
