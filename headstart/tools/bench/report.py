"""Renders a bench document as one self-contained HTML file: report.html, filled with tables and plots."""

import json
import math
from collections.abc import Callable, Iterable, Sequence as Seq
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from headstart import svg
from headstart.tools.bench.document import LEVELS, BenchDocument, BenchRow, Distribution
from headstart.tools.bench.measure import AUTO, OFF, SERVER
from headstart.tools.bench.summary import milliseconds, mode_order, tables

STYLES = {
    OFF: svg.Style("#4b5563", "square", "6 3"), AUTO: svg.Style("#c2410c", "circle"),
    SERVER: svg.Style("#6d28d9", "circle"),
}  # fmt: skip
DARK = {
    svg.AXIS: "#9ca3af", svg.GRID: "#374151", svg.TEXT: "#d1d5db", "#fff": "#111827",
    "#4b5563": "#9ca3af", "#c2410c": "#fb923c", "#6d28d9": "#a78bfa", "#0072b2": "#56b4e9", "#00855f": "#34d399",
    "#b4488c": "#f472b6", "#a16207": "#facc15", "#0e7490": "#22d3ee",
}  # fmt: skip
"""Colour of a plot on a light page -> on a dark page."""
MAX_LATENCY_WORKLOADS = 4  # with more workloads, latencies are drawn for the first load only
LATENCY_TITLES = {"ttft": "Time to first token", "tpot": "Time per token", "itl": "Gaps"}
PERCENT = "{:.0%}".format
TWO_DIGITS = "{:.2f}".format


def render(document: BenchDocument) -> str:
    rows = document.rows
    styles = styles_of({row.mode for row in rows})
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["milliseconds"] = milliseconds
    text = resources.files(__package__).joinpath("report.html").read_text("utf-8")
    return environment.from_string(text).render(
        document=document,
        swatches={mode: Markup(svg.swatch(style)) for mode, style in styles.items()},
        dark=DARK,
        plots=_ReportPlots(rows, styles).draw(),
        heat=[(panel, row, _shares(row)) for panel, here in _first_loads(rows).items() for row in here],
        tables=[([name.replace("\n", " ") for name in columns], cells) for columns, cells in tables(document)],
        settings=json.dumps(dict(document.settings), ensure_ascii=False),
    )


def styles_of(modes: Iterable[str]) -> dict[str, svg.Style]:
    """Returns the plot style of each mode, in display order; the same modes always get the same styles."""
    fixed = iter(svg.PALETTE * 4)
    return {mode: STYLES.get(mode) or next(fixed) for mode in sorted(modes, key=mode_order)}


class _ReportPlots:
    """Draws the plots of all rows. A panel contains the rows that differ only in load and mode."""

    def __init__(self, rows: Seq[BenchRow], styles: dict[str, svg.Style]) -> None:
        self.rows, self.styles = rows, styles
        self.panels: dict[str, list[BenchRow]] = {}
        for row in rows:
            self.panels.setdefault(row.panel, []).append(row)
        self.unit = "requests per second" if any(row.rate is not None for row in rows) else "requests at a time"

    def draw(self) -> dict[str, list[Markup]]:
        def speedup(row: BenchRow) -> list[svg.Point]:
            return [svg.Point(_x(row), ratio.point, ratio.low, ratio.high)] if (ratio := row.speedup) else []

        def values(name: str) -> Callable[[BenchRow], list[svg.Point]]:
            return lambda row: [] if getattr(row, name) is None else [svg.Point(_x(row), getattr(row, name))]

        return {
            "speedup": self._by_load("Speed-up", "times off", speedup, reference=1.0, floor=None, y_format=TWO_DIGITS),
            "workloads": self._by_workload(),
            "throughput": self._by_load("Throughput", "tokens/s", values("output_tokens_per_s")),
            "latency": self._latency(),
            "acceptance": self._acceptance(),
            "cost": self._by_load("Cost", "per million tokens", values("cost_per_million")),
            "energy": self._by_load("Energy", "joules per token", values("joules_per_token")),
        }

    def _series(
        self, rows: Iterable[BenchRow], points: Callable[[BenchRow], list[svg.Point]], **more: Any
    ) -> list[svg.Series]:
        found: dict[str, list[svg.Point]] = {mode: [] for mode in self.styles}
        for row in rows:
            found[row.mode] += points(row)
        return [svg.Series(mode, each, self.styles[mode], **more) for mode, each in found.items()]

    def _by_load(
        self, title: str, y_label: str, points: Callable[[BenchRow], list[svg.Point]], **settings: Any
    ) -> list[Markup]:
        return _draw(
            svg.Plot(
                title=f"{title}: {panel}", x_label=self.unit, y_label=y_label, series=self._series(rows, points),
                x_scale="steps", **settings,
            )
            for panel, rows in self.panels.items()
        )  # fmt: skip

    def _by_workload(self) -> list[Markup]:
        names = list(self.panels)

        def point(row: BenchRow) -> list[svg.Point]:
            place = names.index(row.panel)
            return [svg.Point(ratio.point, place, ratio.low, ratio.high)] if (ratio := row.speedup) else []

        plots = [
            svg.Plot(
                title=f"Speed-up, {load:g} {self.unit}", x_label="times off", y_label="", reference=1.0,
                series=self._series((row for row in self.rows if _x(row) == load), point), x_format=TWO_DIGITS,
            )
            for load in (dict.fromkeys(map(_x, self.rows)) if len(names) > 1 else ())
        ]  # fmt: skip
        drawn = (svg.draw_intervals(plot, names) for plot in svg.with_same_axes(plots))
        return [Markup(each) for each in drawn if each]

    def _latency(self) -> list[Markup]:
        """Returns latency plots for the first and the last load of each workload."""
        plots: dict[str, list[svg.Plot]] = {name: [] for name in LATENCY_TITLES}
        for panel, rows in self.panels.items():
            loads = list(dict.fromkeys(row.group for row in rows))
            is_crowded = len(self.panels) > MAX_LATENCY_WORKLOADS
            for group in loads[:1] if is_crowded else dict.fromkeys((loads[0], loads[-1])):
                here = [row for row in rows if row.group == group]
                for name, title in LATENCY_TITLES.items():
                    series = self._series(here, _cumulative(name), markers=False)
                    plot = svg.Plot(
                        title=f"{title}: {panel}, {_x(here[0]):g} {self.unit}", x_label="ms", y_label="share",
                        series=series, x_scale="log", y_ticks=(0, 0.25, 0.5, 0.75, 0.9, 1), y_format=PERCENT,
                    )  # fmt: skip
                    plots[name].append(plot)
        drawn = [map(svg.draw_lines, svg.with_same_axes(each)) for each in plots.values()]
        return [Markup(each) for group in zip(*drawn, strict=True) for each in group if each]

    def _acceptance(self) -> list[Markup]:
        """Returns acceptance plots for the first load only: just mode "auto" drafts differently at other loads."""

        def points(row: BenchRow) -> list[svg.Point]:
            shares = enumerate(_shares(row), 1)
            return [svg.Point(at, share, *wilson(share, n), note=f" of {n:,} drafts") for at, (share, n) in shares]

        return _draw(
            svg.Plot(
                title=f"Acceptance: {panel}", x_label="position in the draft", y_label="right up to here",
                series=self._series(rows, points), x_scale="steps", y_ticks=(0, 0.25, 0.5, 0.75, 1), y_format=PERCENT,
            )
            for panel, rows in _first_loads(self.rows).items()
        )  # fmt: skip


def _x(row: BenchRow) -> float:
    return row.rate if row.rate is not None else float(row.concurrency or 0)


def _draw(plots: Iterable[svg.Plot]) -> list[Markup]:
    """Returns the plots with equal axes, without empty ones."""
    return [Markup(each) for each in map(svg.draw_lines, svg.with_same_axes(list(plots))) if each]


def _cumulative(name: str) -> Callable[[BenchRow], list[svg.Point]]:  # cumulative distribution of a latency
    def points(row: BenchRow) -> list[svg.Point]:
        times: Distribution | None = getattr(row.latency, name)
        levels = zip(times.quantiles, LEVELS, strict=True) if times else ()
        return [svg.Point(max(value, 1e-3), level) for value, level in levels]

    return points


def _first_loads(rows: Seq[BenchRow]) -> dict[str, list[BenchRow]]:
    """Returns {panel: rows}, with the row of each mode for the first load at which that mode drafted."""
    found: dict[str, dict[str, BenchRow]] = {}
    for row in rows:
        if row.acceptance_at:
            found.setdefault(row.panel, {}).setdefault(row.mode, row)
    return {panel: list(modes.values()) for panel, modes in found.items()}


def _shares(row: BenchRow) -> list[tuple[float, int]]:
    """Returns for each draft position (share of drafts accepted up to there, number of drafts that reached it)."""
    counts = row.speculation.drafts_at if row.speculation else ()
    return list(zip(row.acceptance_at, (count for count in counts if count), strict=False))


def wilson(share: float, count: int) -> tuple[float, float]:
    """Returns the 95 % confidence interval of a share among `count` trials (Wilson 1927)."""
    z = 1.96
    middle, margin = share + z * z / (2 * count), z * math.sqrt((share * (1 - share) + z * z / (4 * count)) / count)
    return max(0.0, (middle - margin) / (1 + z * z / count)), min(1.0, (middle + margin) / (1 + z * z / count))
