"""The document as one HTML file: plots, the table, what was measured and how to read it. Nothing is loaded from
anywhere, and it prints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from headstart.svg import AXIS, GRID, PALETTE, TEXT, Plot, Point, Series, Style, alike, intervals, lines, swatch
from headstart.tools.bench.document import LEVELS, Distribution, Document, Row
from headstart.tools.bench.measure import AUTO, OFF, SERVER
from headstart.tools.bench.summary import milliseconds, mode_order, tables

STYLES = {
    OFF: Style("#4b5563", "square", "6 3"),
    AUTO: Style("#c2410c", "circle"),
    SERVER: Style("#6d28d9", "circle"),
}
DARK = {
    AXIS: "#9ca3af", GRID: "#374151", TEXT: "#d1d5db", "#fff": "#111827",
    "#4b5563": "#9ca3af", "#c2410c": "#fb923c", "#6d28d9": "#a78bfa", "#0072b2": "#56b4e9", "#00855f": "#34d399",
    "#b4488c": "#f472b6", "#a16207": "#facc15", "#0e7490": "#22d3ee",
}  # fmt: skip
"""A colour of the plots -> its like on a dark page."""
MOST_LATENCY_WORKLOADS = 4
"""With more workloads, latencies are drawn for the first load only."""
PERCENT = "{:.0%}".format


@dataclass(frozen=True)
class Section:
    """A heading, a sentence on how to read what follows, plots."""

    title: str
    text: str
    plots: tuple[Markup, ...]
    drafting_only: bool = False  # mode off is in none of them


def render(document: Document) -> str:
    """The HTML text."""
    rows = document.rows
    styles = styles_of({row.mode for row in rows})
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = resources.files(__package__).joinpath("report.html").read_text("utf-8")
    return environment.from_string(text).render(
        document=document,
        legend=[
            (mode, in_words(mode, lookup=bool(document.source.get("lookup"))), Markup(swatch(style)))
            for mode, style in styles.items()
        ],
        dark=[*DARK.items()],
        sections=[section for section in _sections(rows, styles) if section.plots],
        heat=_heat(rows),
        tables=[([name.replace("\n", " ") for name in columns], cells) for columns, cells in tables(document)],
        facts=_facts(document),
        checks=[(check, check.group.load) for check in document.checks if check.ok is not None],
        unjudged={check.name: check.text for check in document.checks if check.ok is None},
        broken=[cell for cell in document.cells if not cell.complete],
        settings=json.dumps(dict(document.settings), ensure_ascii=False),
    )


def styles_of(modes: Iterable[str]) -> dict[str, Style]:
    """A style for each mode, in the order in which they are shown; the same mode looks the same in every report that
    has the same modes."""
    fixed = iter(PALETTE * 4)
    return {mode: STYLES.get(mode) or next(fixed) for mode in sorted(modes, key=mode_order)}


def in_words(mode: str, *, lookup: bool = False) -> str:
    """A mode as a legend says it; `lookup`: what the text says already is tried first."""
    if mode.isdigit():
        return f"depth {mode}: always {mode} drafted"
    return {
        OFF: "off: plain decoding",
        AUTO: "auto: drafted as deep as pays" + (", looked up in the text where that is better" if lookup else ""),
        SERVER: "server: whatever it does",
    }.get(mode, mode)


def _panel(row: Row) -> str:
    """Rows of one panel differ in load and mode only."""
    return row.workload + (", prompts in one chunk" if row.chunked_prefill is False else "")


def _x(row: Row) -> float:
    return row.rate if row.rate is not None else float(row.concurrency or 0)


def _sections(rows: tuple[Row, ...], styles: dict[str, Style]) -> Iterator[Section]:
    x_label = "requests per second" if any(row.rate is not None for row in rows) else "requests at a time"

    def by_load(title: str, y_label: str, value: Callable[[Row], Point | None], **settings: Any) -> Iterator[Markup]:
        plots = []
        for panel in dict.fromkeys(map(_panel, rows)):
            points_of = {
                mode: [point for row in rows if _panel(row) == panel and row.mode == mode and (point := value(row))]
                for mode in styles
            }
            series = [Series(mode, points, styles[mode]) for mode, points in points_of.items()]
            shown = Plot(
                title=f"{title}: {panel}", x_label=x_label, y_label=y_label, series=series, x_scale="steps", **settings
            )
            plots.append(shown)
        yield from _drawn(map(lines, alike(plots)))

    yield Section(
        "Speed-up by load",
        "How many times as fast as without a drafter (1: no difference). Bars: 95 % bootstrap intervals over "
        "alternating pairs of runs.",
        tuple(by_load("Speed-up", "times off", _speedup, reference=1.0, floor=None, y_format="{:.2f}".format)),
        drafting_only=True,
    )
    yield Section(
        "Speed-up by workload",
        "The same numbers, workloads side by side.",
        tuple(_by_workload(rows, styles)),
        drafting_only=True,
    )
    yield Section(
        "Throughput",
        "Output tokens per second of all requests together; medians over runs.",
        tuple(by_load("Throughput", "tokens/s", lambda row: Point(_x(row), row.output_tokens_per_s))),
    )
    yield Section(
        "Latency",
        "The share of answers, or of gaps, that took at most so long (log scale): the further left, the better. A gap "
        "is the time between deliveries, and one delivery holds all tokens of a pass.",
        tuple(_latency(rows, styles)),
    )
    yield Section(
        "Acceptance by position",
        "Of the drafts that had a token at this position, the share that was right up to it; bars: 95 % intervals by "
        "their number.",
        tuple(_acceptance(rows, styles)),
        drafting_only=True,
    )
    yield Section(
        "Cost",
        "Of a million output tokens, at the given price per hour, on a machine that does nothing else.",
        tuple(by_load("Cost", "per million tokens", lambda row: _point(row, row.cost_per_million))),
    )
    yield Section(
        "Energy",
        "Joules per output token, of the whole machine as far as it tells.",
        tuple(by_load("Energy", "joules per token", lambda row: _point(row, row.joules_per_token))),
    )


def _speedup(row: Row) -> Point | None:
    return Point(_x(row), row.speedup.point, row.speedup.low, row.speedup.high) if row.speedup else None


def _point(row: Row, value: float | None) -> Point | None:
    return None if value is None else Point(_x(row), value)


def _drawn(plots: Iterable[str]) -> Iterator[Markup]:
    return (Markup(svg) for svg in plots if svg)


def _by_workload(rows: tuple[Row, ...], styles: dict[str, Style]) -> Iterator[Markup]:
    """One plot per load; none for a single workload."""
    panels = list(dict.fromkeys(map(_panel, rows)))
    if len(panels) < 2:
        return
    plots = []
    for load in dict.fromkeys(map(_x, rows)):
        series = [
            Series(
                mode,
                [
                    Point(row.speedup.point, panels.index(_panel(row)), row.speedup.low, row.speedup.high)
                    for row in rows
                    if row.mode == mode and _x(row) == load and row.speedup
                ],
                style,
            )
            for mode, style in styles.items()
        ]
        unit = "requests per second" if any(row.rate is not None for row in rows) else "at a time"
        plot = Plot(
            title=f"Speed-up, {load:g} {unit}", x_label="times off", y_label="", series=series, reference=1.0,
            x_format="{:.2f}".format,
        )  # fmt: skip
        plots.append(plot)
    yield from _drawn(intervals(plot, panels) for plot in alike(plots))


def _latency(rows: tuple[Row, ...], styles: dict[str, Style]) -> Iterator[Markup]:
    """The first and the last load of each workload."""
    panels = list(dict.fromkeys(map(_panel, rows)))
    names = (("ttft", "Time to first token"), ("tpot", "Time per token"), ("itl", "Gaps"))
    plots: dict[str, list[Plot]] = {name: [] for name, _ in names}
    for panel in panels:
        loads = list(dict.fromkeys(row.group for row in rows if _panel(row) == panel))
        ends = loads[:1] if len(panels) > MOST_LATENCY_WORKLOADS else list(dict.fromkeys((loads[0], loads[-1])))
        for group in ends:
            for name, title in names:
                series = [
                    Series(row.mode, _cumulative(getattr(row.latency, name)), styles[row.mode], markers=False)
                    for row in rows
                    if row.group == group
                ]
                unit = "" if group.rate is not None else " at a time"
                plot = Plot(
                    title=f"{title}: {panel}, {group.load.removesuffix(' unchunked')}{unit}",
                    x_label="ms", y_label="share", series=series, x_scale="log",
                    y_ticks=(0, 0.25, 0.5, 0.75, 0.9, 1), y_format=PERCENT,
                )  # fmt: skip
                plots[name].append(plot)
    by_name = [[*map(lines, alike(each))] for each in plots.values()]
    yield from _drawn(svg for group in zip(*by_name, strict=True) for svg in group)


def _cumulative(times: Distribution | None) -> list[Point]:
    return (
        [Point(max(value, 1e-3), level) for value, level in zip(times.quantiles, LEVELS, strict=True)] if times else []
    )


def _acceptance(rows: tuple[Row, ...], styles: dict[str, Style]) -> Iterator[Markup]:
    """Of the first load: what is drafted depends on it with mode auto only."""
    plots = []
    for panel, here in _first_loads(rows):
        series = [
            Series(
                row.mode,
                [
                    Point(i, share, *wilson(share, count), note=f" of {count:,} drafts")
                    for i, (share, count) in enumerate(_tries(row), 1)
                ],
                styles[row.mode],
            )
            for row in here
        ]
        plot = Plot(
            title=f"Acceptance: {panel}", x_label="position in the draft", y_label="right up to here", series=series,
            x_scale="steps", y_ticks=(0, 0.25, 0.5, 0.75, 1), y_format=PERCENT,
        )  # fmt: skip
        plots.append(plot)
    yield from _drawn(map(lines, alike(plots)))


def _first_loads(rows: tuple[Row, ...]) -> Iterator[tuple[str, list[Row]]]:
    """Of each panel and mode the row of the first load at which it drafted."""
    for panel in dict.fromkeys(map(_panel, rows)):
        here = [row for row in rows if _panel(row) == panel and row.acceptance_at]
        if here:
            yield panel, list({row.mode: row for row in reversed(here)}.values())[::-1]


def _tries(row: Row) -> list[tuple[float, int]]:
    """By position: the share that was right up to it, and of how many drafts; of all where nothing says how long they
    were."""
    spent = row.speculation
    counts = (spent.drafted_at or (spent.drafts,) * len(spent.per_position)) if spent else ()
    return list(zip(row.acceptance_at, (count for count in counts if count), strict=False))


def wilson(share: float, count: int) -> tuple[float, float]:
    """Ends of the 95 % interval of a share (Wilson 1927)."""
    z = 1.96
    middle, room = share + z * z / (2 * count), z * math.sqrt((share * (1 - share) + z * z / (4 * count)) / count)
    return max(0.0, (middle - room) / (1 + z * z / count)), min(1.0, (middle + room) / (1 + z * z / count))


def _heat(rows: tuple[Row, ...]) -> list[tuple[str, str, str, list[tuple[float, int]]]]:
    """(workload, mode, acceptance length, shares and counts by position) of all that drafted."""
    return [
        (panel, row.mode, f"{row.acceptance_length or 1:.2f}", _tries(row))
        for panel, here in _first_loads(rows)
        for row in here
    ]


def _facts(document: Document) -> list[tuple[str, str]]:
    """The few numbers to begin with."""
    source, machine = document.source, document.machine
    facts = [("model", str(source.get("model")))]
    drafter = f"{source.get('drafter')}{', and what the text says already' if source.get('lookup') else ''}"
    told = {**source, "drafter": drafter if source.get("drafter") else None}
    facts += [(name, str(told[name])) for name in ("backend", "drafter", "url", "off_url") if told.get(name)]
    parts = [str(machine.get("cpu")), f"{machine.get('threads')} threads", *machine.get("gpu", [])]
    facts.append(("machine", ", ".join(parts)))
    ratios = sorted((row.speedup.point, f"{row.speedup}: {_where(row)}") for row in document.rows if row.speedup)
    if ratios:
        facts += [("largest speed-up", ratios[-1][1]), ("smallest speed-up", ratios[0][1])]
    times = sorted((row.latency.tpot.mean, _where(row)) for row in document.rows if row.latency.tpot)
    if times:
        facts.append(("lowest TPOT", f"{milliseconds(times[0][0])} ms: {times[0][1]}"))
    return facts


def _where(row: Row) -> str:
    """For people."""
    load = f"{row.rate:g} per second" if row.rate is not None else f"{row.concurrency} at a time"
    return f"{_panel(row)}, {load}, mode {row.mode}"
