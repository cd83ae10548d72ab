"""One streamed answer as it arrived, and what its arrival times say."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["predictable", "random"]
SAME_BURST = 0.2
"""Gaps below this share of the longest usual gap (their 90th percentile) are inside a burst."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """`arrivals`: seconds after the request was sent at which pieces of text came. `tokens` None: not told."""

    kind: Kind
    max_tokens: int
    tokens: int | None
    arrivals: tuple[float, ...]

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def bursts(self) -> int:
        """Groups of pieces that came together: one of an engine's steps each."""
        gaps = self.gaps
        if not gaps:
            return len(self.arrivals)
        limit = SAME_BURST * quantile(gaps, 0.9)
        return 1 + sum(gap > limit for gap in gaps)

    @property
    def seconds(self) -> float:
        """From the first piece to the last: the time to the first token is left out."""
        return self.arrivals[-1] - self.arrivals[0] if self.arrivals else 0.0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Medians over the traces of one kind of text. None: cannot be told. Times in milliseconds."""

    traces: int
    tokens: int
    tokens_per_chunk: float | None
    tokens_per_burst: float | None
    spread: float | None  # of tokens per burst over traces, as a share of it
    ms_per_token: float | None
    first_ms: float
    gap_ms: tuple[float, float, float] | None  # 10th, 50th and 90th percentile
    inside_bursts: float  # share of gaps

    def document(self) -> dict[str, Any]:
        return {
            name: tuple(round(each, 3) for each in value) if isinstance(value, tuple)
            else round(value, 3) if isinstance(value, float)
            else value
            for name, value in vars(self).items()
        }  # fmt: skip


def quantile(values: Sequence[float], share: float) -> float:
    """Of a non-empty list, without interpolation."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def summarize(traces: Sequence[Trace]) -> Summary:
    """The first piece is the prompt's own token, so n tokens in m bursts are (n - 1) / (m - 1) a step."""
    useful = [trace for trace in traces if len(trace.arrivals) > 1]
    counted = [trace for trace in useful if trace.tokens is not None and trace.tokens > 1]
    per_burst = [(_tokens(trace) - 1) / (trace.bursts - 1) for trace in useful if trace.bursts > 1]
    per_chunk = [(_tokens(trace) - 1) / (len(trace.arrivals) - 1) for trace in counted]
    paces = [1e3 * trace.seconds / (_tokens(trace) - 1) for trace in counted]
    gaps = [1e3 * gap for trace in useful for gap in trace.gaps]
    usual = statistics.median(per_burst) if per_burst else None
    return Summary(
        traces=len(traces),
        tokens=sum(trace.tokens or 0 for trace in traces),
        tokens_per_chunk=statistics.median(per_chunk) if per_chunk else None,
        tokens_per_burst=usual,
        spread=statistics.pstdev(per_burst) / usual if usual and len(per_burst) > 1 else None,
        ms_per_token=statistics.median(paces) if paces else None,
        first_ms=1e3 * statistics.median(trace.arrivals[0] for trace in traces if trace.arrivals) if useful else 0.0,
        gap_ms=(quantile(gaps, 0.1), quantile(gaps, 0.5), quantile(gaps, 0.9)) if gaps else None,
        inside_bursts=sum(len(trace.arrivals) - trace.bursts for trace in useful) / max(len(gaps), 1),
    )


def _tokens(trace: Trace) -> int:
    """Pieces stand for tokens where the server does not count them."""
    return trace.tokens if trace.tokens is not None else len(trace.arrivals)


def by_length(traces: Sequence[Trace]) -> dict[int, dict[str, float]]:
    """Milliseconds a token of predictable text, by the number asked for: with the first token's time left out, and
    over the whole answer as a naive test would divide it."""
    paces_of = {}
    for length in sorted({trace.max_tokens for trace in traces}):
        own = [trace for trace in traces if trace.max_tokens == length and (trace.tokens or 0) > 1 and trace.arrivals]
        if own:
            paces_of[length] = {
                "ms_per_token": statistics.median(1e3 * each.seconds / (_tokens(each) - 1) for each in own),
                "naive_ms_per_token": statistics.median(1e3 * each.arrivals[-1] / _tokens(each) for each in own),
            }
    return paces_of
