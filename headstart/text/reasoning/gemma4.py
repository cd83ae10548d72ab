"""Gemma 4: reasoning between channel tags before the answer."""

from headstart.text.reasoning.think import ThinkParser


class Gemma4ThinkParser(ThinkParser):
    """`<|channel>thought...<channel|>`."""

    opening, closing = "<|channel>thought", "<channel|>"
    marks = (opening,)


REASONING = Gemma4ThinkParser
