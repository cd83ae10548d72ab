"""Gemma 4's thoughts: a channel of their own before the answer."""

from __future__ import annotations

from headstart.text.reasoning.think import ThinkParser


class Gemma4ThinkParser(ThinkParser):
    opening, closing = "<|channel>thought", "<channel|>"
    marks = (opening,)


REASONING = Gemma4ThinkParser
