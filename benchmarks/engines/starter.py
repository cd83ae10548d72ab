"""Ways to start an engine from nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engines.process import Group

Launched = tuple[Group, Callable[[], None]]
"""The process, and what waits for its first token."""


@dataclass(frozen=True)
class Starter:
    """One way to start: `launch(prompt, max_tokens)` begins."""

    name: str
    launch: Callable[[str, int], Launched]
    ends: bool  # by itself, after one answer
