"""Lines of a run on stderr, and the plot of its acceptance."""

import json
import sys
from itertools import cycle
from pathlib import Path

from headstart.svg import PALETTE, Plot, Point, Series, draw_document


def print_line(line: str) -> None:
    """Print a line on stderr that stays above a progress bar."""
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
