"""Rows from cells, speed-ups with confidence intervals, checks of mode "auto", tables, comparison of two documents.

Cells of the same workload, load and repeat are a pair: they ran one after the other, so a slow phase of the machine
affects both. A speed-up is the median over pairs of log(on / off), which one disturbed pair changes little. Its
interval is the percentile bootstrap of that median, from 2.5 % to 97.5 %: pairs are resampled with replacement,
RESAMPLES times, with a fixed seed.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.core import Float32, Report
from headstart.errors import UsageError
from headstart.tools.bench.document import (
    LEVELS,
    BenchCell,
    BenchDocument,
    BenchRow,
    CheckName,
    Distribution,
    DraftCounts,
    Interval,
    Latency,
    LoadSetting,
    SpeedCheck,
)
from headstart.tools.bench.measure import AUTO, OFF

RESAMPLES = 10_000
TAIL = 0.025  # probability outside each end of an interval
MIN_FOR_INTERVAL = 3  # pairs needed for an interval
MIN_PAIRS = 10  # pairs needed for a check
MIN_POINT, MIN_LOW = 0.98, 0.95  # check "never slower": least speed-up, and least lower bound
NEAR_BEST = 0.97  # check "near the best depth": least ratio


def draw_resamples(count: int, seed: int = 0) -> NDArray[np.int64]:
    """Returns indices below `count`, drawn with replacement: [RESAMPLES, count]."""
    return np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))


def bootstrap_interval(resampled: NDArray[Any]) -> tuple[float, float]:
    """Returns the 95 % percentile interval of a statistic, given its value for each resample: [RESAMPLES]."""
    low, high = np.quantile(resampled, (TAIL, 1 - TAIL)).tolist()
    return low, high


def speedup(off: Iterable[BenchCell], on: Iterable[BenchCell]) -> Interval | None:
    """Returns the speed of `on` divided by that of `off`, over their pairs; None without a complete pair."""
    before = {(cell.group, cell.repeat): cell.speed for cell in off if cell.complete}
    keys = ((cell, (cell.group, cell.repeat)) for cell in on if cell.complete)
    return paired(tuple((before[key], cell.speed) for cell, key in keys if key in before))


@lru_cache(maxsize=4096)  # documents are written again and again while they grow
def paired(pairs: tuple[tuple[float, float], ...]) -> Interval | None:
    """Returns the speed-up of pairs (speed before, speed after); None without a pair of positive speeds."""
    logs = np.array([math.log(after / before) for before, after in pairs if before > 0 and after > 0])
    if not len(logs):
        return None
    return _interval(float(np.median(logs)), len(logs), lambda: _medians(logs))


def unpaired(before: Seq[float], after: Seq[float]) -> Interval | None:
    """Returns the ratio of the median speeds of runs that did not alternate. Its interval does not cover drift of the
    machine. `pairs` is the smaller count; None without positive speeds on both sides."""
    if not before or not after or min(*before, *after) <= 0:
        return None
    first, second = (np.log(np.array(side)) for side in (before, after))
    point = float(np.median(second) - np.median(first))
    return _interval(point, min(len(first), len(second)), lambda: _medians(second) - _medians(first, seed=1))


def _interval(point: float, count: int, resample: Callable[[], Float32]) -> Interval:
    """Returns the interval of a log ratio `point`; `resample` gives the log ratio of each resample."""
    if count < MIN_FOR_INTERVAL:
        return Interval(math.exp(point), None, None, count)
    return Interval(math.exp(point), *bootstrap_interval(np.exp(resample())), count)


def _medians(values: NDArray[np.float64], seed: int = 0) -> Float32:
    medians: Float32 = np.median(values[draw_resamples(len(values), seed)], axis=1)
    return medians


def never_slower(off: Seq[BenchCell], auto: Seq[BenchCell]) -> SpeedCheck:
    """Checks that `auto` is as fast as plain decoding in one workload under one load: over MIN_PAIRS pairs or more the
    speed-up must be at least MIN_POINT, and its lower bound at least MIN_LOW."""
    ratio = speedup(off, auto)
    if ratio is None or ratio.pairs < MIN_PAIRS or ratio.low is None:
        return _check("never slower", auto, None, ratio, _too_few(ratio))
    ok = ratio.point >= MIN_POINT and ratio.low >= MIN_LOW
    bounds = f"needs {MIN_POINT:g}x and a lower bound of {MIN_LOW:g}x"
    return _check("never slower", auto, ok, ratio, f"{ratio} of off over {ratio.pairs} pairs; {bounds}")


def near_best(fixed: Mapping[str, Seq[BenchCell]], auto: Seq[BenchCell]) -> SpeedCheck:
    """Checks that `auto` is within 3 % of the best of `fixed` (cells by mode). The best mode is chosen on pairs with an
    even `repeat` and compared on the odd ones: the maximum of several noisy numbers is biased upwards."""
    even, odd = ([cell for cell in auto if cell.repeat % 2 == rest] for rest in (0, 1))
    ratios = {mode: speedup(even, cells) for mode, cells in fixed.items()}
    known = {mode: ratio.point for mode, ratio in ratios.items() if ratio}
    best = max(known, key=known.__getitem__, default=None)
    ratio = speedup(fixed[best], odd) if best is not None else None
    if ratio is None or len(auto) < MIN_PAIRS:
        text = _too_few(speedup(auto, fixed[best]) if best is not None else None)
        return _check("near the best depth", auto, None, ratio, text)
    text = f"{ratio} of mode {best}, the best on even pairs, over {ratio.pairs} odd ones; needs {NEAR_BEST:g}x"
    return _check("near the best depth", auto, ratio.point >= NEAR_BEST, ratio, text)


def complete_cells(cells: Iterable[BenchCell]) -> list[dict[str, list[BenchCell]]]:
    """Returns {mode: complete cells} of each workload and load, in order of appearance."""
    groups: dict[LoadSetting, dict[str, list[BenchCell]]] = {}
    for cell in cells:
        if cell.complete:
            groups.setdefault(cell.group, {}).setdefault(cell.mode, []).append(cell)
    return list(groups.values())


def checks(cells: Iterable[BenchCell]) -> list[SpeedCheck]:
    """Returns both checks for every workload and load that was measured in the modes they need."""
    made = []
    for modes in complete_cells(cells):
        auto = modes.pop(AUTO, None)
        if auto and OFF in modes:
            made.append(never_slower(modes[OFF], auto))
        if auto and len(modes) > 1:
            made.append(near_best(modes, auto))
    return made


def _too_few(ratio: Interval | None) -> str:
    count = ratio.pairs if ratio else 0
    return f"not judged: {count} pair{'' if count == 1 else 's'}, {MIN_PAIRS} are needed"


def _check(name: CheckName, cells: Seq[BenchCell], ok: bool | None, ratio: Interval | None, text: str) -> SpeedCheck:
    return SpeedCheck(**vars(cells[0].group), name=name, ok=ok, ratio=ratio, text=text)


def rows_of(cells: Seq[BenchCell], *, price_per_hour: float | None = None) -> list[BenchRow]:
    """Returns one row per workload, load and mode; incomplete cells are left out."""
    return [
        _row(modes[mode], modes.get(OFF, []), price_per_hour)
        for modes in complete_cells(cells)
        for mode in sorted(modes, key=mode_order)
    ]


def mode_order(mode: str) -> tuple[int, int, str]:
    """Sort key of modes: "off", then depths, then the others."""
    return (0, 0, mode) if mode == OFF else (1, int(mode), mode) if mode.isdecimal() else (2, 0, mode)


def _row(cells: list[BenchCell], off: list[BenchCell], price_per_hour: float | None) -> BenchRow:
    rate = median(cell.output_tokens_per_s for cell in cells)
    output, prompt = sum(cell.output_tokens for cell in cells), sum(cell.prompt_tokens for cell in cells)
    spent, latencies = DraftCounts.total(cell.speculation for cell in cells), [vars(cell.latency) for cell in cells]
    joules = [cell.joules for cell in cells if cell.joules is not None]
    cached = [cell.cached_tokens for cell in cells if cell.cached_tokens is not None]
    return BenchRow(
        **vars(cells[0].group),
        mode=cells[0].mode,
        cells=len(cells),
        failed=sum(cell.failed for cell in cells),
        output_tokens=output,
        output_tokens_per_s=rate,
        total_tokens_per_s=median(cell.total_tokens_per_s for cell in cells),
        latency=Latency(**{name: pooled(each[name] for each in latencies) for name in latencies[0]}),
        speculation=spent,
        acceptance_rate=spent.acceptance_rate if spent else None,
        acceptance_length=spent.acceptance_length if spent and spent.drafts else None,
        acceptance_at=tuple(spent.acceptance_at) if spent else (),
        passes_saved=spent.passes_saved / output if spent and output else None,
        cached_share=sum(cached) / prompt if len(cached) == len(cells) and prompt else None,
        speedup=speedup(off, cells) if cells[0].mode != OFF else None,
        cost_per_million=cost_per_million(price_per_hour, rate),
        joules_per_token=sum(joules) / output if len(joules) == len(cells) and output else None,
    )


def cost_per_million(price_per_hour: float | None, tokens_per_s: float) -> float | None:
    """Returns the price of a million output tokens; None without a price or a speed."""
    return None if price_per_hour is None or tokens_per_s <= 0 else price_per_hour / 3600 / (tokens_per_s / 1e6)


def pooled(parts: Iterable[Distribution | None]) -> Distribution | None:
    """Combines distributions. Count and mean are exact; quantiles are interpolated from those of the parts."""
    known = [part for part in parts if part is not None]
    if len(known) < 2:
        return known[0] if known else None
    count = sum(part.count for part in known)
    mean = sum(part.mean * part.count for part in known) / count
    grid = np.linspace(0, 1, 401)
    values = np.concatenate([np.interp(grid, LEVELS, part.quantiles) for part in known])
    weights = np.concatenate([np.full(len(grid), part.count / count / len(grid)) for part in known])
    order = np.argsort(values)
    values, below = values[order], np.cumsum(weights[order])
    at = np.interp((0.5, 0.9, 0.99, *LEVELS), below - weights[order] / 2, values).tolist()
    return Distribution(count, mean, at[0], at[1], at[2], tuple(at[3:]))


NAMES = ("workload", "load", "mode")
SPEED = (*NAMES, "output\ntokens/s", "all\ntokens/s", "acceptance\nrate", "length", "passes\nsaved",
         "speed-up against off")  # fmt: skip
LATENCY = (*NAMES, "TTFT ms\nmean", "p50 / p90 / p99", "TPOT ms\nmean", "p50 / p90 / p99", "gap ms\np50 / p90 / p99")
COST, ENERGY = "per million\ntokens", "joules\nper token"

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # (column titles, rows with a text for each column)


def tables(document: BenchDocument) -> tuple[Table, Table]:
    """Returns a table of speed, with cost and energy if known, and a table of latency."""
    costs = any(row.cost_per_million is not None for row in document.rows)
    energy = any(row.joules_per_token is not None for row in document.rows)
    columns = SPEED + ((COST,) if costs else ()) + ((ENERGY,) if energy else ())
    speeds = [tuple(_speed(row, costs, energy)) for row in document.rows]
    return (columns, speeds), (LATENCY, [tuple(_latency(row)) for row in document.rows])


def _speed(row: BenchRow, costs: bool, energy: bool) -> Iterator[str]:
    yield from (row.workload, row.load, row.mode)
    yield from (f"{row.output_tokens_per_s:.1f}", f"{row.total_tokens_per_s:.1f}")
    yield number(row.acceptance_rate, "{:.2f}")
    yield number(row.acceptance_length, "{:.2f}")
    yield number(row.passes_saved if row.acceptance_length is not None else None, "{:.0%}")
    yield str(row.speedup or "")
    if costs:
        yield number(row.cost_per_million, "{:.3g}")
    if energy:
        yield number(row.joules_per_token, "{:.3g}")


def _latency(row: BenchRow) -> Iterator[str]:
    yield from (row.workload, row.load, row.mode)
    for each in (row.latency.ttft, row.latency.tpot):
        yield milliseconds(each.mean) if each else ""
        yield _percentiles(each)
    yield _percentiles(row.latency.itl)


def _percentiles(times: Distribution | None) -> str:
    return " / ".join(map(milliseconds, (times.p50, times.p90, times.p99))) if times else ""


def number(value: float | None, pattern: str) -> str:
    return "" if value is None else pattern.format(value)


def milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def table_lines(document: BenchDocument) -> list[str]:
    """Returns the lines below the tables: incomplete cells, checks and notes."""
    lines = [] if document.complete else [f"INCOMPLETE: {document.error}. Earlier measurements are kept."]
    for cell in (each for each in document.cells if not each.complete):
        answered = f"{cell.requests - cell.failed} answers, {cell.failed} failed"
        lines.append(f"interrupted, in no row: {cell.workload}, {cell.load}, {cell.mode}: {answered}")
    for check in document.checks:
        if check.ok is not None:
            answer = "yes" if check.ok else "NO"
            lines.append(f"{check.name}, {check.workload}, {check.load}: {answer} ({check.text})")
    unknown = {check.name: check.text for check in document.checks if check.ok is None}
    lines += [f"{name}: {text}" for name, text in unknown.items()]
    return lines + [f"note: {note}" for note in document.notes]


COLUMNS = ("workload", "load", "mode", "out tok/s", "ratio", "TTFT ms", "TPOT ms", "accept.\nlength", "per 1M\ntokens")
COMPARED = (
    ("", "source", ("model", "backend", "drafter", "head", "url")),
    ("machine, ", "machine", ("cpu", "threads", "gpu", "headstart")),
    ("asked, ", "settings", ("requests", "input_tokens", "output_tokens", "scale", "seed")),
)
"""(label, field, keys) of document entries that a comparison reports if they differ."""


def compare_documents(before: Path, after: Path) -> Report:
    """Compares the rows with the same workload, load and mode. The intervals of the ratios do not cover changes of the
    machine between the files. Raises UsageError for a file that is not a bench document, or without common rows."""
    first, second = BenchDocument.read(before), BenchDocument.read(after)
    theirs = {_key(row): row for row in second.rows}
    shared = [(row, theirs[_key(row)]) for row in first.rows if _key(row) in theirs]
    if not shared:
        hint = f"the first has {_names(first)}; the second {_names(second)}"
        raise UsageError(f"{before} and {after} have no workload, load and mode in common", hint)
    rows = [_compare_rows(first, second, one, two) for one, two in shared]
    differences = [
        f"{label}{name}: {old.get(name)} → {new.get(name)}"
        for label, part, names in COMPARED
        for old, new in [(getattr(first, part), getattr(second, part))]
        for name in names
        if old.get(name) != new.get(name)
    ]
    lines = [f"differs: {text}" for text in differences]
    for path, document in ((before, first), (after, second)):
        lines += [] if document.complete else [f"{path} is incomplete: {document.error}"]
    if skipped := len(first.rows) + len(second.rows) - 2 * len(rows):
        lines.append(f"{skipped} rows are in one of the files only")
    data = {"before": str(before), "after": str(after), "rows": rows, "differences": differences}
    return Report(ok=True, data=data, lines=lines)


def comparison_rows(data: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            each["workload"], each["load"], each["mode"], _change(each["output_tokens_per_s"], "{:.1f}"),
            each["text"], _change(each["ttft_ms"]), _change(each["tpot_ms"]),
            _change(each["acceptance_length"], "{:.2f}"), _change(each["cost_per_million"], "{:.3g}"),
        )
        for each in data["rows"]
    ]  # fmt: skip


def _key(item: BenchRow | BenchCell) -> tuple[LoadSetting, str]:
    """Returns the key by which rows of two documents match. An unknown chunked_prefill (a server) counts as true."""
    return replace(item.group, chunked_prefill=item.chunked_prefill is not False), item.mode


def _names(document: BenchDocument) -> str:
    rows = document.rows
    kinds = ([row.workload for row in rows], [row.load for row in rows], [row.mode for row in rows])
    return ", ".join("/".join(dict.fromkeys(names)) for names in kinds if names) or "nothing"


def _compare_rows(first: BenchDocument, second: BenchDocument, one: BenchRow, two: BenchRow) -> dict[str, Any]:
    kept = ([cell for cell in document.cells if cell.complete] for document in (first, second))
    ratio = unpaired(*([cell.speed for cell in cells if _key(cell) == _key(one)] for cells in kept))
    times = [[getattr(row.latency, name) for row in (one, two)] for name in ("ttft", "tpot")]
    ttft, tpot = ([each.mean if each else None for each in pair] for pair in times)
    plain = ("output_tokens_per_s", "acceptance_length", "cost_per_million")
    return {
        **vars(one.group), "load": one.load, "mode": one.mode,
        **{name: [getattr(row, name) for row in (one, two)] for name in plain}, "ttft_ms": ttft, "tpot_ms": tpot,
        "ratio": asdict(ratio) if ratio else None, "text": str(ratio or ""),
    }  # fmt: skip


def _change(values: list[float | None], pattern: str = "") -> str:
    if values == [None, None]:
        return ""
    shown = [number(v, pattern) if pattern or v is None else milliseconds(v) for v in values]
    return " → ".join(text or "?" for text in shown)
