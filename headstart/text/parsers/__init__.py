"""Streaming parsers of generated text: reasoning, content, tool calls.

Each file with a `PARSER` class is one format of tool calls. Formats of reasoning are in `headstart.text.reasoning`.
"""

from typing import Literal

from headstart import registry
from headstart.text.parsers.stream import (
    Arguments,
    Content,
    Event,
    Parser,
    PlainParser,
    Reasoning,
    ToolCall,
    merge_events,
)
from headstart.text.parsers.tools import Tools

__all__ = [
    "Arguments", "Content", "Event", "Parser", "Reasoning", "ToolCall", "Tools", "format_in", "is_opened",
    "make_parser", "merge_events",
]  # fmt: skip


def format_in(template: str, kind: Literal["tool_formats", "reasoning_formats"]) -> str | None:
    """Name of the format whose `marks` all occur in a chat template; of several formats the one with most marks."""
    constant = registry.KINDS[kind].constant
    marks = {name: getattr(registry.find(kind, name), constant).marks for name in registry.available(kind)}
    matches = {name: len(each) for name, each in marks.items() if each and all(mark in template for mark in each)}
    return max(matches, key=lambda name: matches[name], default=None)


def is_opened(reasoning: str, prompt: str) -> bool:
    """Whether a prompt ends with the opening tag of a reasoning format."""
    opening: str = registry.find("reasoning_formats", reasoning).REASONING.opening
    return prompt.rstrip().endswith(opening)


def make_parser(
    tool_format: str | None = None, tools: Tools = (), reasoning: str | None = None, *, reasoning_opened: bool = False,
    one_call: bool = False,
) -> Parser:  # fmt: skip
    """A parser for one answer. `reasoning_opened`: the prompt ends with the opening tag of the reasoning. `one_call`:
    calls after the first are dropped. Raises UsageError for an unknown format."""
    parser: Parser = PlainParser()
    if tool_format is not None:
        parser = found = registry.find("tool_formats", tool_format).PARSER(tools)
        found.one_call = one_call
    if reasoning is not None:
        parser = registry.find("reasoning_formats", reasoning).REASONING(parser, opened=reasoning_opened)
    return parser
