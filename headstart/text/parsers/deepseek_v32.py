"""DeepSeek-V3.2 and V4 (DSML): functions and parameters in tags, which declare their values as strings or JSON."""

from headstart.text.parsers._tags import ANY, InvokeParser
from headstart.text.parsers.stream import Steps

_BAR = "\uff5cDSML\uff5c"


class DeepSeekV32Parser(InvokeParser):
    """`<BAR invoke name="f"><BAR parameter name="k" string="true">v</BAR parameter></BAR invoke>` without the spaces
    after BAR, which is DSML between full-width bars. A block has all calls: function_calls (V3.2), tool_calls (V4)."""

    bar = _BAR
    blocks = ("function_calls", "tool_calls")
    marks = (_BAR,)
    default_types = frozenset({ANY})

    def _value(self, function: str, key: str, end: str) -> Steps[None]:
        yield from self._expect(' string="')
        is_string = (yield from self._expect("true", "false")) == "true"
        yield from self._expect('">')
        yield from self._read_typed_member(frozenset({"string"}) if is_string else self.default_types, key, (end,))


PARSER = DeepSeekV32Parser
