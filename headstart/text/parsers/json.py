"""The whole answer is a call in JSON, as Llama 3 writes it: an object, several with `;` between, or an array."""

from __future__ import annotations

from headstart.text.parsers._objects import ObjectCalls
from headstart.text.parsers.stream import NotThis, Steps


class JsonParser(ObjectCalls):
    """An answer that begins with anything else is content, and so is what follows the calls.

    Without markers any JSON answer looks like a call, so this asks for more than other formats: members that calls
    have, arguments, and the name of one of the request's tools where it lists some.
    """

    members = frozenset({"name", "arguments", "parameters", "type", "id"})
    named_first = False

    def _grammar(self) -> Steps[None]:
        yield from self._space()
        yield from self._accept("<|python_tag|>")
        yield from self._space()
        listed = yield from self._accept("[")
        start, self._at = self._at, 0
        any_call = yield from self._calls(start)
        if any_call and listed:
            yield from self._ending("]")
            self._forget()
        if any_call:
            yield from self._ending("")

    def _calls(self, start: int) -> Steps[bool]:
        """Reads calls until there is no other; False when the last one did not fit."""
        while True:
            self._begin_call()
            self._at = start
            try:
                yield from self._space()
                yield from self._object_call()
            except NotThis as reason:
                self._stop_call(reason)
                return False
            yield from self._space()
            separator = yield from self._accept(";", ",")
            start, self._at = self._at, 0
            if not separator:
                return True

    def _known(self, name: str) -> str:
        if self._names and name not in self._names:
            raise NotThis
        return super()._known(name)


PARSER = JsonParser
