"""Rates per round, their spread, and Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

from engines.process import Engine

Record = dict[str, Any]
Speeds = dict[str, list[float]]
"""tokens/s of each round, by engine."""

LLAMA_OF = {"int8": "Q8_0"}
"""headstart's weight type -> llama.cpp's of the same width, if the names differ."""


def rates(records: Sequence[Record], tokens: Callable[[Record], int], seconds: str) -> dict[str, list[float]]:
    """tokens/s per engine and round: sums over the round."""
    sums: dict[tuple[str, int], list[float]] = {}
    for record in records:
        total = sums.setdefault((record["engine"], record["round"]), [0.0, 0.0])
        total[0] += tokens(record)
        total[1] += record[seconds]
    found: dict[str, list[float]] = {}
    for (name, _), (number, time_s) in sorted(sums.items(), key=lambda item: item[0][1]):
        found.setdefault(name, []).append(number / time_s if time_s > 0 else 0.0)
    return found


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Median, with the quartiles when there are more values."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    low, _, high = quantiles(values, n=4, method="inclusive")
    return f"{median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def ratio(values: Sequence[float], base: Sequence[float] | None) -> str:
    """Ratio to a base by round, with its spread; empty without a base."""
    if base is None or base is values or not all(base):
        return ""
    return spread([one / other for one, other in zip(values, base, strict=True)], 2)


def speed_table(title: str, engines: Sequence[Engine], columns: dict[str, dict[str, list[float]]]) -> list[str]:
    """Markdown table: speed per engine and column, then ratios of each column to both peers."""
    peers = [name for name in ("llama.cpp", "vLLM") if any(engine.name.startswith(name) for engine in engines)]
    header = [title, *(f"{column}{end}" for column in columns for end in ("", *(f" / {peer}" for peer in peers)))]
    lines = ["", "| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for engine in engines:
        cells = [engine.name]
        same_width = f"llama.cpp {LLAMA_OF.get(engine.weights, engine.weights)}"
        for speeds in columns.values():
            vllm = [values for name, values in speeds.items() if name.startswith("vLLM")]
            bases = {"llama.cpp": speeds.get(same_width), "vLLM": max(vllm, key=median, default=None)}
            values = speeds[engine.name]
            cells += [spread(values), *(ratio(values, bases[peer]) for peer in peers)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def start_table(
    names: Sequence[str], seconds: dict[str, list[float]], memory: dict[str, dict[str, float]]
) -> list[str]:
    """Markdown table of the section `start`."""
    lines = [
        "",
        "| start | seconds to the first token | private MiB | anonymous MiB | resident MiB |",
        "|---|---|---|---|---|",
    ]
    for name in names:
        peaks = memory[name]
        sizes = " | ".join(f"{peaks[kind]:.0f}" for kind in ("private_mib", "anonymous_mib", "resident_mib"))
        lines.append(f"| {name} | {spread(seconds[name], 2)} | {sizes} |")
    return lines
