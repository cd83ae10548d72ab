"""What a parser finds in generated text, in the shape of OpenAI's chat deltas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """A call begins; calls of one answer are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of a call's arguments, which are one JSON text."""

    index: int
    text: str


Event: TypeAlias = Content | Reasoning | ToolCall | Arguments


def joined(events: Iterable[Event]) -> list[Event]:
    """The same events with neighbours of one kind (and one call) made one, and without empty ones."""
    out: list[Event] = []
    for event in events:
        if isinstance(event, ToolCall):
            out.append(event)
        elif event.text:
            last = out[-1] if out else None
            if isinstance(last, type(event)) and replace(last, text="") == replace(event, text=""):
                out[-1] = replace(event, text=last.text + event.text)
            else:
                out.append(event)
    return out
