"""What a person sees while training: a bar on a terminal, a line now and then elsewhere. All on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeRemainingColumn

LINE_EVERY = 20.0
"""Seconds between lines where there is no terminal."""


Show = Callable[[float, str], None]
"""Called with the share done (0 to 1) and a text."""


@contextmanager
def shown(title: str) -> Iterator[Show]:
    """A function to report to while a phase runs."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(title)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=1.0, text="")
        yield lambda share, text: bar.update(task, completed=share, text=text)


class _Lines:
    def __init__(self, title: str) -> None:
        self._title, self._last = title, 0.0

    def __call__(self, share: float, text: str) -> None:
        now = time.monotonic()
        if now - self._last >= LINE_EVERY:
            self._last = now
            note(f"{self._title} {share:.1%}: {text}")


def note(line: str) -> None:
    """One line that stays."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201  progress is this module's product
