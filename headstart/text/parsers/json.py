"""Llama 3: the whole answer is calls in JSON: one object, several with `;` between them, or an array."""

from headstart.text.parsers.stream import Mismatch, Steps
from headstart.text.parsers.tools import ObjectCallParser


class JsonParser(ObjectCallParser):
    """An answer that does not begin with a call is content, and so is text after the calls.

    Without markers any JSON answer could look like a call. A call therefore needs arguments, must have no members
    except those of `members`, and must name one of the request's tools if there are any.
    """

    members = frozenset({"name", "arguments", "parameters", "type", "id"})
    may_lack_arguments = False

    def _grammar(self) -> Steps[None]:
        yield from self._skip_space()
        yield from self._accept("<|python_tag|>")
        yield from self._skip_space()
        listed = yield from self._accept("[")
        start, self._position = self._position, 0
        any_call = yield from self._calls(start)
        if any_call and listed:
            yield from self._ending("]")
            self._drop_read_text()
        if any_call:
            yield from self._ending("")

    def _calls(self, start: int) -> Steps[bool]:
        """Read all calls, from position `start`. Returns False if the last one was malformed."""
        while True:
            self._begin_call()
            self._position = start
            try:
                yield from self._skip_space()
                yield from self._read_object_call()
            except Mismatch as reason:
                self._abort_call(reason)
                return False
            yield from self._skip_space()
            separator = yield from self._accept(";", ",")
            start, self._position = self._position, 0
            if not separator:
                return True

    def _check_name(self, name: str) -> str:
        if self._names and name not in self._names:
            raise Mismatch
        return super()._check_name(name)


PARSER = JsonParser
