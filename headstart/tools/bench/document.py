"""The JSON document of `headstart bench`: BenchCell, BenchRow, SpeedCheck, BenchDocument.

Engines in this process and servers use the same format. Times are in milliseconds, rates in tokens per second. A value
that was not measured is null, never 0. A *cell* is one run of one workload under one load in one mode. Cells with the
same workload, load and `repeat` form a pair: they ran one after the other. A *row* combines the cells that differ only
in `repeat`. Modes: "off" (no drafter), "1", "3", ... (fixed depth), "auto" (the engine chooses the depth), "server"
(the server's own setting, which requests cannot change).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from headstart.errors import UsageError
from headstart.files import read_text
from headstart.stats import acceptance_length, sum_positions

KIND: Literal["headstart-bench"] = "headstart-bench"
VERSION: Literal[1] = 1
SUMMED = ("drafts", "drafted", "accepted", "passes_saved")
CheckName = Literal["never slower", "near the best depth"]
LEVELS = (0.0, *(i / 20 for i in range(1, 20)), 0.99, 1.0)
"""Levels of `Distribution.quantiles`: minimum, every 5 %, 99 %, maximum."""


@dataclass(frozen=True)
class Distribution:
    """Distribution of `count` times, in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    quantiles: tuple[float, ...]  # at LEVELS, for plots

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Self | None:
        """Returns the distribution of times in seconds; None if there are none."""
        values = np.fromiter(seconds, np.float64) * 1e3
        if not len(values):
            return None
        p50, p90, p99, *quantiles = np.quantile(values, (0.5, 0.9, 0.99, *LEVELS)).tolist()
        return cls(len(values), float(values.mean()), p50, p90, p99, tuple(quantiles))


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Latencies of one cell or row, in ms; null without samples."""

    ttft: Distribution | None  # request sent (or due, with Poisson arrivals) to first token
    tpot: Distribution | None  # per answer: (last - first token) / (tokens - 1)
    itl: Distribution | None  # inter-token latency: between deliveries; one delivery has all tokens of a pass
    e2e: Distribution | None  # request sent to last token


@dataclass(frozen=True, kw_only=True)
class DraftCounts:
    """Counts of drafting, in vLLM's terms."""

    drafts: int
    drafted: int  # draft tokens
    accepted: int  # draft tokens
    per_position: tuple[int, ...]  # [i]: drafts whose token i was accepted
    drafted_at: tuple[int, ...] | None = None  # [i]: drafts that had a token i; null if a server does not report it
    passes_saved: int = 0  # output tokens minus passes of the model
    sources: Mapping[str, int] = field(default_factory=dict)  # accepted tokens by drafter; empty for a server

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_length(self) -> float:
        """`stats.acceptance_length` of these counts."""
        return acceptance_length(self.drafts, self.accepted)

    @property
    def drafts_at(self) -> tuple[int, ...]:
        """Number of drafts with a token at each position; all drafts if the server does not report `drafted_at`."""
        return self.drafted_at or (self.drafts,) * len(self.per_position)

    @property
    def acceptance_at(self) -> list[float]:
        """[i]: share of the drafts with a token i whose tokens up to i were all accepted."""
        return [hits / count for hits, count in zip(self.per_position, self.drafts_at, strict=False) if count]

    @classmethod
    def total(cls, parts: Iterable[Self | None]) -> Self | None:
        """Returns the sum of the counts; None if one of them is None, or there are none."""
        counts = list(parts)
        known = [part for part in counts if part is not None]
        if not counts or len(known) < len(counts):
            return None
        tries = [part.drafted_at for part in known if part.drafted_at is not None]
        return cls(
            **{name: sum(getattr(part, name) for part in known) for name in SUMMED},
            per_position=tuple(sum_positions(part.per_position for part in known)),
            drafted_at=tuple(sum_positions(tries)) if len(tries) == len(known) else None,
            sources={name: sum(part.sources.get(name, 0) for part in known) for part in known for name in part.sources},
        )


@dataclass(frozen=True, kw_only=True)
class LoadSetting:
    """Workload and load of a cell, row or check."""

    workload: str
    concurrency: int | None  # requests at a time; null with Poisson arrivals
    rate: float | None  # Poisson arrivals per second; null with a fixed concurrency
    chunked_prefill: bool | None  # null for servers, which decide themselves

    @property
    def group(self) -> "LoadSetting":
        """These four fields alone, as a dictionary key."""
        return LoadSetting(**{each.name: getattr(self, each.name) for each in fields(LoadSetting)})

    @property
    def panel(self) -> str:
        """Title of the report's plots that show this workload."""
        return self.workload + (", prompts in one chunk" if self.chunked_prefill is False else "")

    @property
    def load(self) -> str:
        text = f"{self.concurrency}" if self.rate is None else f"{self.rate:g}/s"
        return text + (" unchunked" if self.chunked_prefill is False else "")


@dataclass(frozen=True, kw_only=True)
class BenchCell(LoadSetting):
    mode: str
    repeat: int
    complete: bool  # false: the run was interrupted; no row contains this cell
    requests: int
    failed: int
    errors: tuple[str, ...]  # distinct error texts of failed requests
    seconds: float
    prompt_tokens: int
    cached_tokens: int | None  # prompt tokens found in the prefix cache; null if the server does not report it
    output_tokens: int
    latency: Latency
    speculation: DraftCounts | None
    joules: float | None

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def total_tokens_per_s(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds if self.seconds else 0.0

    @property
    def speed(self) -> float:
        """Speed for speed-up ratios: output tokens/s. With Poisson arrivals, which fix that rate, 1 / mean TPOT."""
        if self.rate is None:
            return self.output_tokens_per_s
        return 1e3 / self.latency.tpot.mean if self.latency.tpot and self.latency.tpot.mean else 0.0


@dataclass(frozen=True)
class Interval:
    """A ratio of speeds with its bootstrap interval (summary.speedup)."""

    point: float
    low: float | None  # ends of the 95 % interval; null with too few pairs
    high: float | None
    pairs: int

    def __str__(self) -> str:
        return f"{self.point:.2f}x" + ("" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]")


@dataclass(frozen=True, kw_only=True)
class BenchRow(LoadSetting):
    """Summary of the complete cells of one workload, load and mode: pooled latencies, median rates, summed counts."""

    mode: str
    cells: int
    failed: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    latency: Latency
    speculation: DraftCounts | None
    acceptance_rate: float | None
    acceptance_length: float | None
    acceptance_at: tuple[float, ...]
    passes_saved: float | None  # share of the output tokens
    cached_share: float | None  # of the prompt tokens
    speedup: Interval | None  # against mode "off"
    cost_per_million: float | None  # output tokens, in the price's currency
    joules_per_token: float | None


@dataclass(frozen=True, kw_only=True)
class SpeedCheck(LoadSetting):
    """Result of one check of mode "auto", for one workload and load."""

    name: CheckName
    ok: bool | None  # null when there are too few pairs to tell
    ratio: Interval | None
    text: str


@dataclass(frozen=True, kw_only=True)
class BenchDocument:
    kind: Literal["headstart-bench"] = KIND
    version: Literal[1] = VERSION
    created: str  # UTC, ISO 8601
    source: Mapping[str, Any]  # what was measured: model, backend, server
    machine: Mapping[str, Any]  # where the bench ran
    settings: Mapping[str, Any]  # the options
    complete: bool  # false: the bench was interrupted, for the reason in `error`
    error: str
    notes: tuple[str, ...] = ()
    rows: tuple[BenchRow, ...] = ()
    checks: tuple[SpeedCheck, ...] = ()
    cells: tuple[BenchCell, ...] = field(default=(), repr=False)

    def json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, path: Path) -> "BenchDocument":
        """Reads a JSON file. Raises UsageError for a file that cannot be read or is not a bench document."""
        from pydantic import TypeAdapter, ValidationError  # costs start-up time that measuring need not pay

        text = read_text(path)
        try:
            document: BenchDocument = TypeAdapter(cls).validate_python(json.loads(text))
        except ValidationError as error:
            first = error.errors()[0]
            wrong = f"not a bench document: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        except ValueError as error:
            wrong = f"not JSON: {error}"
        else:
            return document
        raise UsageError(f"{path} is {wrong}", "headstart bench --out writes such a file")
