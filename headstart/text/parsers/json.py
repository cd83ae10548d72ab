"""Llama 3: the answer is calls in JSON: one object, several with `;` between them, or an array; perhaps in a fence."""

from headstart.text.parsers.stream import Mismatch, Steps
from headstart.text.parsers.tools import ObjectCallParser

_FENCES = ("```json", "```")


class JsonParser(ObjectCallParser):
    """An answer that does not begin with a call is content, and so is text after the calls."""

    is_strict = True

    def _grammar(self) -> Steps[None]:
        while (yield from self._group()):
            pass

    def _group(self) -> Steps[bool]:
        """Read calls that stand alone, in an array or in a Markdown fence. Returns False if no call follows."""
        yield from self._skip_space()
        opened = yield from self._accept("<|python_tag|>", *_FENCES)
        yield from self._skip_space()
        listed = yield from self._accept("[")
        start, self._position = self._position, 0
        if not (yield from self._calls(start)):
            return False
        for closing in ("]" if listed else "", "```" if opened in _FENCES else "", ""):
            yield from self._ending(closing)
            self._drop_read_text()
        return True

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


PARSER = JsonParser
