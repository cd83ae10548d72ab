"""GLM-4.5 and later: a name, then keys and values in tags. Values are JSON unless the tool's schema says string."""

from headstart.text.parsers._tags import ANY, TaggedArgumentsParser
from headstart.text.parsers.stream import Steps

_END, _KEY = "</tool_call>", "<arg_key>"


class Glm45Parser(TaggedArgumentsParser):
    """`<tool_call>name\\n<arg_key>k</arg_key>\\n<arg_value>v</arg_value>\\n</tool_call>`; newlines are optional."""

    opens = ("<tool_call>",)
    marks = (*opens, _KEY)
    ends = (_END,)
    default_types = frozenset({ANY})

    def _call(self, opened: str) -> Steps[None]:
        name = yield from self._name()
        tag = yield from self._expect(_KEY, _END)
        self._position -= len(tag)
        self._announce(name)
        while (yield from self._expect(_KEY, _END)) == _KEY:
            key, _ = yield from self._read_until("</arg_key>")
            yield from self._skip_space()
            yield from self._expect("<arg_value>")
            yield from self._read_member(name, key.strip(), ("</arg_value>",))
            yield from self._skip_space()
        self._complete_arguments()
        self._drop_read_text()


PARSER = Glm45Parser
