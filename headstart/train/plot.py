"""A picture of a training run: held-out acceptance by position over the tokens seen."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path

from headstart.svg import PALETTE, Plot, Point, Series, document


def draw(log: Path, target: Path) -> None:
    """Read log.jsonl, write an SVG file."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    shares = [[row["tokens"] / 1e6, *row["held_out"]["all"]["cumulative"]] for row in rows]
    series = [
        Series(f"first {position}", [Point(row[0], row[position]) for row in shares], style)
        for position, style in zip(range(1, min(map(len, shares))), cycle(PALETTE), strict=False)
    ]
    plot = Plot(
        title="Held-out drafts that are right, all of the ...",
        x_label="training tokens (millions)",
        y_label="share of drafts",
        series=series,
        y_ticks=(0, 0.2, 0.4, 0.6, 0.8, 1),
    )
    target.write_text(document(plot))
