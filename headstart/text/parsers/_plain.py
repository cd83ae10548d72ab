"""The parser of a text without any format."""

from __future__ import annotations

from headstart.text.parsers.stream import Steps, StreamParser


class PlainParser(StreamParser):
    """All text is content."""

    def _grammar(self) -> Steps[None]:
        yield from ()
