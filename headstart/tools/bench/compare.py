"""Two bench documents side by side: what changed, and is it more than noise?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headstart.core import Report
from headstart.errors import UsageError
from headstart.tools.bench.document import Cell, Document, Group, Row
from headstart.tools.bench.statistics import unpaired
from headstart.tools.bench.summary import milliseconds, number

COLUMNS = ("workload", "load", "mode", "out tok/s", "ratio", "TTFT ms", "TPOT ms", "accept.\nlength", "per 1M\ntokens")
TOLD = ("model", "backend", "drafter", "head", "url")
"""Entries of `Document.source` whose difference is worth a line."""


def run(before: Path, after: Path) -> Report:
    """Rows that both have, by workload, load and mode. The runs did not alternate, so the intervals of the ratios know
    nothing of how the machine changed in between. Raises UsageError for a file that is no bench document, and when
    nothing was measured in both."""
    first, second = Document.read(before), Document.read(after)
    theirs = {_key(row): row for row in second.rows}
    shared = [(row, theirs[_key(row)]) for row in first.rows if _key(row) in theirs]
    if not shared:
        raise UsageError(
            f"{before} and {after} have no workload, load and mode in common",
            f"the first has {_names(first)}; the second {_names(second)}",
        )
    rows = [_compare(first, second, one, two) for one, two in shared]
    data = {"before": str(before), "after": str(after), "rows": rows, "differences": _differences(first, second)}
    return Report(ok=True, data=data, lines=_lines(data, first, second))


def table(data: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Texts for COLUMNS, before → after."""
    return [
        (
            each["workload"], each["load"], each["mode"], _change(each["output_tokens_per_s"], "{:.1f}"),
            each["text"], _change(each["ttft_ms"]), _change(each["tpot_ms"]),
            _change(each["acceptance_length"], "{:.2f}"), _change(each["cost_per_million"], "{:.3g}"),
        )
        for each in data["rows"]
    ]  # fmt: skip


def _key(item: Row | Cell) -> tuple[Group, str]:
    """A server does not tell whether it cuts prompts into chunks; most do."""
    return item.group._replace(chunked_prefill=item.chunked_prefill is not False), item.mode


def _names(document: Document) -> str:
    kinds = ([row.workload for row in document.rows], [row.group.load for row in document.rows],
             [row.mode for row in document.rows])  # fmt: skip
    return ", ".join("/".join(dict.fromkeys(names)) for names in kinds if names) or "nothing"


def _compare(first: Document, second: Document, one: Row, two: Row) -> dict[str, Any]:
    speeds = [
        [cell.speed for cell in document.cells if cell.complete and _key(cell) == _key(one)]
        for document in (first, second)
    ]
    ratio = unpaired(*speeds)
    means = {
        f"{name}_ms": [each.mean if (each := getattr(row.latency, name)) else None for row in (one, two)]
        for name in ("ttft", "tpot")
    }
    plain = ("output_tokens_per_s", "acceptance_length", "cost_per_million")
    return {
        **one.group._asdict(),
        "load": one.group.load,
        "mode": one.mode,
        **{name: [getattr(row, name) for row in (one, two)] for name in plain},
        **means,
        "ratio": asdict(ratio) if ratio else None,
        "text": str(ratio or ""),
    }


def _change(values: list[float | None], pattern: str = "") -> str:
    if values == [None, None]:
        return ""
    shown = [number(v, pattern) if pattern or v is None else milliseconds(v) for v in values]
    return " → ".join(text or "?" for text in shown)


def _differences(first: Document, second: Document) -> list[str]:
    parts = (
        ("", first.source, second.source, TOLD),
        ("machine, ", first.machine, second.machine, ("cpu", "threads", "gpu", "headstart")),
        ("asked, ", first.settings, second.settings, ("requests", "input_tokens", "output_tokens", "scale", "seed")),
    )
    return [
        f"{part}{name}: {before.get(name)} → {after.get(name)}"
        for part, before, after, names in parts
        for name in names
        if before.get(name) != after.get(name)
    ]


def _lines(data: Mapping[str, Any], first: Document, second: Document) -> list[str]:
    lines = [f"differs: {text}" for text in data["differences"]]
    for name, document in (("before", first), ("after", second)):
        if not document.complete:
            lines.append(f"{data[name]} is incomplete: {document.error}")
    skipped = len(first.rows) + len(second.rows) - 2 * len(data["rows"])
    return lines + ([f"{skipped} rows are in one of the files only"] if skipped else [])
