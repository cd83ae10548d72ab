"""Small plots as SVG text: lines with error bars over a linear, logarithmic or category axis, and intervals by name.

Each series has its own colour, marker and dash, so that series differ in greyscale too.
"""

import math
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, field, replace
from html import escape
from typing import Literal, NamedTuple

WIDTH, HEIGHT = 420, 270
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 30, 44
ROW = 18  # height of one interval in `draw_intervals`
MAX_LOG_TICKS = 8
DODGE = 5  # pixels between markers of several series at the same x
LETTER = 6.4  # approximate width of a letter
AXIS, GRID, TEXT = "#6b7280", "#e5e7eb", "#374151"
Scale = Literal["linear", "log", "steps"]


class Style(NamedTuple):
    """Appearance of a series."""

    colour: str
    marker: Literal["circle", "square", "triangle", "diamond", "cross"]
    dash: str = ""  # SVG's stroke-dasharray


PALETTE = (
    Style("#0072b2", "triangle", "2 3"),
    Style("#00855f", "diamond", "8 3 2 3"),
    Style("#b4488c", "cross", "4 2"),
    Style("#a16207", "triangle", "10 3"),
    Style("#0e7490", "diamond", "1 2"),
)


class Point(NamedTuple):
    """One measured value."""

    x: float
    y: float
    low: float | None = None  # end of the error bar
    high: float | None = None  # end of the error bar
    note: str = ""  # added to the tooltip


@dataclass(frozen=True)
class Series:
    """Points in order of x; without `markers` a plain line."""

    name: str
    points: Seq[Point]
    style: Style
    markers: bool = True


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A plot with a title and axes."""

    title: str
    x_label: str
    y_label: str
    series: Seq[Series] = field(default=(), repr=False)
    x_scale: Scale = "linear"  # "steps": the occurring values, evenly spaced
    reference: float | None = None  # y (in intervals x) of a reference line
    floor: float | None = 0.0  # start of the y axis; None: below the lowest value
    y_ticks: Seq[float] = ()  # empty: chosen
    other_points: Seq[Point] = field(default=(), repr=False)  # of other plots, within the same axes
    x_format: Callable[[float], str] = "{:g}".format
    y_format: Callable[[float], str] = "{:g}".format

    @property
    def points(self) -> list[Point]:
        return [point for series in self.series for point in series.points]


def with_same_axes(plots: Seq[Plot]) -> list[Plot]:
    """The plots with equal axes, for comparison."""
    points = [point for plot in plots for point in plot.points]
    return [replace(plot, other_points=points) for plot in plots]


def draw_lines(plot: Plot) -> str:
    """The plot as an <svg> element; empty without points."""
    if not plot.points:
        return ""
    points = [*plot.points, *plot.other_points]
    xs = sorted({point.x for point in points})
    x_at, x_ticks = _x_axis(plot.x_scale, xs)
    y_values = [value for p in points for value in (p.y, p.low, p.high) if value is not None]
    y_at, y_ticks = _y_axis(plot, y_values)
    parts = [
        *_frame(plot, [(x_at(x), plot.x_format(x)) for x in x_ticks], [(y_at(y), plot.y_format(y)) for y in y_ticks])
    ]
    if plot.reference is not None:
        y = y_at(plot.reference)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{AXIS}"/>')
    shown = [series for series in plot.series if series.points]
    for index, series in enumerate(shown):
        shift = DODGE * (index - (len(shown) - 1) / 2) if series.markers and plot.x_scale == "steps" else 0.0
        parts += _series(series, x_at, shift, y_at, plot)
    return _svg(plot.title, parts, HEIGHT)


def draw_document(plot: Plot) -> str:
    """The plot as an SVG file, with a legend below."""
    legend = [
        f'<g transform="translate({LEFT + 95 * (index % 4)} {HEIGHT + 20 * (index // 4)})">'
        f"{swatch(series.style)}{_text(38, 12, series.name, anchor='start')}</g>"
        for index, series in enumerate(plot.series)
    ]
    height = HEIGHT + 20 * -(-len(legend) // 4)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
    body = draw_lines(plot).replace("<svg ", f'<svg width="{WIDTH}" height="{HEIGHT}" ', 1)
    return "\n".join([head, body, *legend, "</svg>", ""])


def draw_intervals(plot: Plot, names: Seq[str]) -> str:
    """One band per name: points whose y is the index of the name, with error bars along x."""
    if not plot.points:
        return ""
    points = [*plot.points, *plot.other_points]
    shown = [series for series in plot.series if series.points]
    band = ROW * max(len(shown), 1) + 8
    height = TOP + band * len(names) + BOTTOM
    left = 16 + LETTER * max(map(len, names))
    values = [value for p in points for value in (p.x, p.low, p.high) if value is not None]
    low, high = _padded([*values, *([plot.reference] if plot.reference is not None else [])], None)
    ticks = nice_ticks(low, high)
    inner = WIDTH - RIGHT - left

    def at(x: float) -> float:
        return left + (x - low) / (high - low) * inner

    bottom = height - BOTTOM
    parts = [_text(12, 18, plot.title, anchor="start", weight="600", size=13)]
    for tick in ticks:
        parts.append(_line(at(tick), TOP, at(tick), bottom, GRID))
        parts.append(_text(at(tick), bottom + 16, plot.x_format(tick)))
    if plot.reference is not None:
        parts.append(_line(at(plot.reference), TOP, at(plot.reference), bottom, AXIS))
    parts.append(_text(left + inner / 2, bottom + 34, plot.x_label))
    for row, name in enumerate(names):
        top = TOP + row * band
        parts.append(_text(left - 8, top + band / 2 + 4, name, anchor="end"))
        parts.append(_line(left, top + band, left + inner, top + band, GRID))
        for index, series in enumerate(shown):
            y = top + 4 + ROW * (index + 0.5)
            for point in (each for each in series.points if each.y == row):
                if point.low is not None and point.high is not None:
                    parts.append(_line(at(point.low), y, at(point.high), y, series.style.colour, 1.6))
                hint = f"{name}, {series.name}: {plot.x_format(point.x)}"
                parts.append(marker(series.style, at(point.x), y, hint))
    return _svg(plot.title, parts, height)


def _series(
    series: Series, x_at: Callable[[float], float], shift: float, y_at: Callable[[float], float], plot: Plot
) -> Iterator[str]:
    """Line, error bars and markers, moved right by `shift` pixels."""
    style = series.style
    path = " ".join(f"{x_at(point.x) + shift:.1f},{y_at(point.y):.1f}" for point in series.points)
    dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
    yield f'<polyline points="{path}" fill="none" stroke="{style.colour}" stroke-width="1.8"{dash}/>'
    if not series.markers:
        return
    for point in series.points:
        x = x_at(point.x) + shift
        if point.low is not None and point.high is not None:
            yield _line(x, y_at(point.low), x, y_at(point.high), style.colour, 1.4)
        hint = f"{series.name}, {plot.x_format(point.x)}: {plot.y_format(point.y)}{point.note}"
        yield marker(style, x, y_at(point.y), hint)


def marker(style: Style, x: float, y: float, hint: str = "") -> str:
    """A marker with a tooltip."""
    title = f"<title>{escape(hint)}</title>" if hint else ""
    fill = f'fill="{style.colour}" stroke="#fff" stroke-width="0.8"'
    if style.marker == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {fill}>{title}</circle>'
    corners = {
        "square": ((-3.6, -3.6), (3.6, -3.6), (3.6, 3.6), (-3.6, 3.6)),
        "triangle": ((0, -4.8), (4.6, 3.6), (-4.6, 3.6)),
        "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
        "cross": ((-4, -1.4), (-1.4, -1.4), (-1.4, -4), (1.4, -4), (1.4, -1.4), (4, -1.4), (4, 1.4), (1.4, 1.4),
                  (1.4, 4), (-1.4, 4), (-1.4, 1.4), (-4, 1.4)),
    }[style.marker]  # fmt: skip
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" {fill}>{title}</polygon>'


def swatch(style: Style) -> str:
    """Line and marker of a series in a legend."""
    dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
    line = f'<line x1="1" x2="33" y1="8" y2="8" stroke="{style.colour}" stroke-width="1.8"{dash}/>'
    return f'<svg width="34" height="16" viewBox="0 0 34 16" aria-hidden="true">{line}{marker(style, 17, 8)}</svg>'


def _x_axis(scale: Scale, xs: Seq[float]) -> tuple[Callable[[float], float], Seq[float]]:
    """A function from x to pixels, and the ticks."""
    inner = WIDTH - LEFT - RIGHT
    if scale == "steps":
        places = {x: LEFT + inner * (i + 0.5) / len(xs) for i, x in enumerate(xs)}
        return places.__getitem__, xs
    low, high = min(xs), max(xs)
    if scale == "log":
        low = max(low, 1e-3)
        high = max(high, low * 1.01)

        def at(x: float) -> float:
            return LEFT + inner * math.log(max(x, low) / low) / math.log(high / low)

        return at, log_ticks(low, high)
    if high == low:
        high = low + 1
    return lambda x: LEFT + inner * (x - low) / (high - low), nice_ticks(low, high)


def _y_axis(plot: Plot, values: Seq[float]) -> tuple[Callable[[float], float], Seq[float]]:
    """A function from y to pixels, and the ticks."""
    shown = [*values, *([plot.reference] if plot.reference is not None else []), *plot.y_ticks]
    low, high = _padded(shown, plot.floor)
    if plot.y_ticks:
        low, high = min(plot.y_ticks), max(plot.y_ticks)
    inner = HEIGHT - TOP - BOTTOM
    return lambda y: TOP + inner * (high - y) / (high - low), plot.y_ticks or nice_ticks(low, high)


def _padded(values: Seq[float], floor: float | None) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return (low - margin if floor is None else floor), high + margin


def nice_ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, about six of them."""
    raw = (high - low) / 6
    power = 10 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`: at most MAX_LOG_TICKS of 1, 2, 3, 5 and 7 times a power of ten, or evenly
    spaced numbers if these are fewer than three."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    chosen = list[float]()
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 2, 3, 5, 7)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        finer = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
        if len(finer) > MAX_LOG_TICKS:
            break
        chosen = finer
    return chosen if len(chosen) >= 3 else nice_ticks(low, high)


def _frame(plot: Plot, x_ticks: Seq[tuple[float, str]], y_ticks: Seq[tuple[float, str]]) -> Iterator[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    yield _text(12, 18, plot.title, anchor="start", weight="600", size=13)
    for y, label in y_ticks:
        yield _line(LEFT, y, right, y, GRID)
        yield _text(LEFT - 6, y + 4, label, anchor="end")
    for x, label in x_ticks:
        yield _line(x, bottom, x, bottom + 4, AXIS)
        yield _text(x, bottom + 17, label)
    yield _line(LEFT, bottom, right, bottom, AXIS)
    yield _text((LEFT + right) / 2, HEIGHT - 8, plot.x_label)
    middle = (TOP + bottom) / 2
    yield f'<g transform="rotate(-90 14 {middle:.0f})">{_text(14, middle, plot.y_label)}</g>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, width: float = 1.0) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width:g}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", weight: str = "400", size: int = 11) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" font-weight="{weight}" fill="{TEXT}">{escape(text)}</text>'


def _svg(title: str, parts: Seq[str], height: float) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'
    return "\n".join([head, *parts, "</svg>"])
