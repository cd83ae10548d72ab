"""Mistral: reasoning between special tokens before the answer."""

from headstart.text.reasoning.think import ThinkParser


class MistralThinkParser(ThinkParser):
    """`[THINK]...[/THINK]`."""

    opening, closing = "[THINK]", "[/THINK]"
    marks = (opening, closing)


REASONING = MistralThinkParser
