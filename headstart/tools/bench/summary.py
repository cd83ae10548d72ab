"""Cells to rows, and rows to what a terminal shows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence as Seq
from statistics import median

import numpy as np

from headstart.tools.bench.document import LEVELS, Cell, Distribution, Document, DraftCounts, Group, Latency, Row
from headstart.tools.bench.measure import OFF
from headstart.tools.bench.statistics import speedup

LATENCIES = ("ttft", "tpot", "itl", "e2e")


def rows_of(cells: Seq[Cell], *, price_per_hour: float | None = None) -> list[Row]:
    """One row per workload, load and mode, in order of appearance; cells that broke off are left out."""
    cells_of: dict[tuple[Group, str], list[Cell]] = {}
    for cell in cells:
        if cell.complete:
            cells_of.setdefault((cell.group, cell.mode), []).append(cell)
    modes = list(dict.fromkeys(cell.mode for cell in cells))
    groups = dict.fromkeys(group for group, _ in cells_of)
    keys = [(group, mode) for group in groups for mode in sorted(modes, key=mode_order) if (group, mode) in cells_of]
    return [_row(cells_of[key], cells_of.get((key[0], OFF), []), price_per_hour) for key in keys]


def mode_order(mode: str) -> tuple[int, int, str]:
    """off, depths, then the others."""
    return (0, 0, mode) if mode == OFF else (1, int(mode), mode) if mode.isdigit() else (2, 0, mode)


def _row(cells: list[Cell], off: list[Cell], price_per_hour: float | None) -> Row:
    rate = median(cell.output_tokens_per_s for cell in cells)
    output, prompt = sum(cell.output_tokens for cell in cells), sum(cell.prompt_tokens for cell in cells)
    spent = DraftCounts.total(cell.speculation for cell in cells)
    joules = [cell.joules for cell in cells if cell.joules is not None]
    cached = [cell.cached_tokens for cell in cells if cell.cached_tokens is not None]
    drafted = spent is not None and spent.drafts > 0
    return Row(
        **cells[0].group._asdict(),
        mode=cells[0].mode,
        cells=len(cells),
        failed=sum(cell.failed for cell in cells),
        output_tokens=output,
        output_tokens_per_s=rate,
        total_tokens_per_s=median(cell.total_tokens_per_s for cell in cells),
        latency=Latency(**{name: pooled(getattr(cell.latency, name) for cell in cells) for name in LATENCIES}),
        speculation=spent,
        acceptance_rate=spent.acceptance_rate if spent else None,
        acceptance_length=spent.acceptance_length if spent and drafted else None,
        acceptance_at=tuple(spent.acceptance_at) if spent else (),
        passes_saved=spent.passes_saved / output if spent and output else None,
        cached_share=sum(cached) / prompt if len(cached) == len(cells) and prompt else None,
        speedup=speedup(off, cells) if cells[0].mode != OFF else None,
        cost_per_million=cost_per_million(price_per_hour, rate),
        joules_per_token=sum(joules) / output if len(joules) == len(cells) and output else None,
    )


def cost_per_million(price_per_hour: float | None, tokens_per_s: float) -> float | None:
    """Price of a million output tokens, of a machine that does nothing else."""
    if price_per_hour is None or tokens_per_s <= 0:
        return None
    return price_per_hour / 3600 / (tokens_per_s / 1e6)


def pooled(parts: Iterable[Distribution | None]) -> Distribution | None:
    """All values of several distributions together, each read off its quantiles: exact in count and mean, and near
    enough in between."""
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
SPEED = (
    *NAMES,
    "output\ntokens/s",
    "all\ntokens/s",
    "acceptance\nrate",
    "length",
    "passes\nsaved",
    "speed-up against off",
)
LATENCY = (*NAMES, "TTFT ms\nmean", "p50 / p90 / p99", "TPOT ms\nmean", "p50 / p90 / p99", "gap ms\np50 / p90 / p99")
COST, ENERGY = "per million\ntokens", "joules\nper token"

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Columns, and rows of as many texts."""


def tables(document: Document) -> tuple[Table, Table]:
    """Speed, with cost and energy where they are known; and latency."""
    costs = any(row.cost_per_million is not None for row in document.rows)
    energy = any(row.joules_per_token is not None for row in document.rows)
    columns = SPEED + ((COST,) if costs else ()) + ((ENERGY,) if energy else ())
    speeds = [tuple(_speed(row, costs, energy)) for row in document.rows]
    return (columns, speeds), (LATENCY, [tuple(_latency(row)) for row in document.rows])


def _speed(row: Row, costs: bool, energy: bool) -> Iterator[str]:
    yield from (row.workload, row.group.load, row.mode)
    yield from (f"{row.output_tokens_per_s:.1f}", f"{row.total_tokens_per_s:.1f}")
    yield number(row.acceptance_rate, "{:.2f}")
    yield number(row.acceptance_length, "{:.2f}")
    yield number(row.passes_saved if row.acceptance_length is not None else None, "{:.0%}")
    yield str(row.speedup or "")
    if costs:
        yield number(row.cost_per_million, "{:.3g}")
    if energy:
        yield number(row.joules_per_token, "{:.3g}")


def _latency(row: Row) -> Iterator[str]:
    yield from (row.workload, row.group.load, row.mode)
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


def table_lines(document: Document) -> list[str]:
    """What stands below the table."""
    lines = [] if document.complete else [f"INCOMPLETE: {document.error}. What was measured until then is kept."]
    for cell in (each for each in document.cells if not each.complete):
        answered = f"{cell.requests - cell.failed} answers, {cell.failed} failed"
        lines.append(f"broke off, in no row: {cell.workload}, {cell.group.load}, {cell.mode}: {answered}")
    for check in document.checks:
        if check.ok is not None:
            answer = "yes" if check.ok else "NO"
            lines.append(f"{check.name}, {check.workload}, {check.group.load}: {answer} ({check.text})")
    if unknown := {check.name: check.text for check in document.checks if check.ok is None}:
        lines += [f"{name}: {text}" for name, text in unknown.items()]
    return lines + [f"note: {note}" for note in document.notes]
