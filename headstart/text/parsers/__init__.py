"""Generated text to events while it streams: reasoning, content, tool calls. One file is one tool format, by its name:
it defines `PARSER`, made from the request's tools. What stands before the answer is in `headstart.text.reasoning`."""

from __future__ import annotations

from typing import Literal

from headstart import registry
from headstart.text.parsers._plain import PlainParser
from headstart.text.parsers.events import Arguments, Content, Event, Reasoning, ToolCall, joined
from headstart.text.parsers.stream import Parser
from headstart.text.parsers.tools import Tools

__all__ = [
    "Arguments", "Content", "Event", "Parser", "Reasoning", "ToolCall", "Tools", "format_in", "is_opened", "joined",
    "make_parser",
]  # fmt: skip


def format_in(template: str, kind: Literal["tool_formats", "reasoning_formats"]) -> str | None:
    """The format whose marks a chat template holds, the most of them where several fit; None where none does."""
    constant = registry.KINDS[kind].constant
    marks = {name: getattr(registry.find(kind, name), constant).marks for name in registry.available(kind)}
    fitting = {name: len(each) for name, each in marks.items() if each and all(mark in template for mark in each)}
    return max(fitting, key=lambda name: fitting[name], default=None)


def is_opened(reasoning: str, prompt: str) -> bool:
    """Has the chat template already written the opening tag of a reasoning format, at the end of a prompt?"""
    opening: str = registry.find("reasoning_formats", reasoning).REASONING.opening
    return prompt.rstrip().endswith(opening)


def make_parser(
    tool_format: str | None = None, tools: Tools = (), reasoning: str | None = None, *, reasoning_opened: bool = False
) -> Parser:
    """A parser for one answer. `reasoning_opened`: the chat template has already written the opening tag. Raises
    UsageError for an unknown format."""
    parser: Parser = PlainParser() if tool_format is None else registry.find("tool_formats", tool_format).PARSER(tools)
    if reasoning is not None:
        parser = registry.find("reasoning_formats", reasoning).REASONING(parser, opened=reasoning_opened)
    return parser
