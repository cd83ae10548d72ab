"""Progress of a run on stderr (a bar on a terminal, else lines), and the plot of its acceptance."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeRemainingColumn

from headstart.svg import PALETTE, Plot, Point, Series, draw_document

LINE_SECONDS = 20.0  # seconds between lines where stderr is no terminal

ShowProgress = Callable[[float, str], None]  # called with the share done (0 to 1) and a text


@contextmanager
def show_progress(title: str) -> Iterator[ShowProgress]:
    """Shows a phase of training, as a bar on a terminal and as lines elsewhere; yields the reporting function."""
    console, last = Console(stderr=True), 0.0

    def show_line(share: float, text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print_line(f"{title} {share:.1%}: {text}")

    if not console.is_terminal:
        yield show_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[text]}"))
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=1.0, text="")
        yield lambda share, text: bar.update(task, completed=share, text=text)


def print_line(line: str) -> None:
    """Print a line on stderr that stays above the bar."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201  progress is this module's product


def draw_acceptance(log: Path, target: Path) -> None:
    """Plot held-out acceptance by position over the training tokens: log.jsonl to an SVG file."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    shares = [[row["tokens"] / 1e6, *row["held_out"]["all"]["cumulative"]] for row in rows]
    series = [
        Series(f"first {position}", [Point(row[0], row[position]) for row in shares], style)
        for position, style in zip(range(1, min(map(len, shares))), cycle(PALETTE), strict=False)
    ]
    plot = Plot(
        title="Held-out drafts that are right, all of the ...", x_label="training tokens (millions)",
        y_label="share of drafts", series=series, y_ticks=(0, 0.2, 0.4, 0.6, 0.8, 1),
    )  # fmt: skip
    target.write_text(draw_document(plot))
