"""Mistral's thoughts, between special tokens, before the answer."""

from __future__ import annotations

from headstart.text.reasoning.think import ThinkParser


class MistralThinkParser(ThinkParser):
    opening, closing = "[THINK]", "[/THINK]"
    marks = (opening, closing)


REASONING = MistralThinkParser
