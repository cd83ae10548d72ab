"""Verdict whether an endpoint drafts, from arrival times of streamed answers or from metrics.

All functions are pure, so that recorded traces can be judged again.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from headstart.tools.engine_metrics import EngineCounters

Kind = Literal["predictable", "random"]
Answer = Literal["on", "dead", "off", "unknown"]
SAME_BURST = 0.2  # a gap below this share of the 90th percentile of gaps is inside a burst
DEAD = 1.02  # acceptance length below which drafts count as never accepted
MIN_CONFIDENCE = 0.7  # least confidence for a verdict
BURST, BURST_SCALE, BURST_MAX_ODDS = 1.2, 0.06, 4.0
"""Log-odds of drafting by burst size: tokens per burst at log-odds 0, tokens per unit of log-odds, limit."""
PACE, PACE_SCALE, PACE_MIN_ODDS, PACE_MAX_ODDS = 1.15, 0.1, 1.5, 2.0
"""Log-odds by pace (time per token of random text / of predictable text): ratio at log-odds 0, ratio per unit, limits.
The lower limit is weak, since drafting may be on without saving time."""
SAME, BATCHED = 0.05, 1.5
"""Bursts above BATCHED tokens whose size differs by less than SAME between texts are not drafts: the server sends
every few tokens, or a proxy buffers."""


@dataclass(frozen=True, kw_only=True)
class StreamTrace:
    kind: Kind
    max_tokens: int
    tokens: int | None  # None: the server does not report it
    arrivals: tuple[float, ...]  # arrival times of pieces of text, in seconds since the request

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

    @property
    def bursts(self) -> int:
        """Number of groups of pieces that arrived together; each is one engine step."""
        gaps = self.gaps
        if not gaps:
            return len(self.arrivals)
        limit = SAME_BURST * quantile(gaps, 0.9)
        return 1 + sum(gap > limit for gap in gaps)

    @property
    def seconds(self) -> float:
        """Seconds from the first piece to the last."""
        return self.arrivals[-1] - self.arrivals[0] if self.arrivals else 0.0

    @property
    def num_tokens(self) -> int:
        """Number of tokens; if the server does not report it, the number of pieces."""
        return self.tokens if self.tokens is not None else len(self.arrivals)


@dataclass(frozen=True, kw_only=True)
class TimingSummary:
    """Medians over the traces of one kind of text. None: unknown. Times in milliseconds."""

    traces: int
    tokens: int
    tokens_per_chunk: float | None
    tokens_per_burst: float | None
    spread: float | None  # standard deviation of tokens per burst over traces, divided by their median
    ms_per_token: float | None
    first_ms: float
    gap_ms: tuple[float, float, float] | None  # 10th, 50th and 90th percentile
    inside_bursts: float  # share of gaps

    def document(self) -> dict[str, Any]:
        return {name: _rounded(value) for name, value in vars(self).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_rounded, value))
    return round(value, 3) if isinstance(value, float) else value


def quantile(values: Sequence[float], share: float) -> float:
    """Returns a quantile of a non-empty list, without interpolation."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def summarize(traces: Sequence[StreamTrace]) -> TimingSummary:
    """Summarizes traces. Prefill gives the first token, so n tokens in m bursts are (n - 1) / (m - 1) per step."""
    useful = [trace for trace in traces if len(trace.arrivals) > 1]
    counted = [trace for trace in useful if trace.tokens is not None and trace.tokens > 1]
    per_burst = [(trace.num_tokens - 1) / (trace.bursts - 1) for trace in useful if trace.bursts > 1]
    per_chunk = [(trace.num_tokens - 1) / (len(trace.arrivals) - 1) for trace in counted]
    paces = [1e3 * trace.seconds / (trace.num_tokens - 1) for trace in counted]
    gaps = [1e3 * gap for trace in useful for gap in trace.gaps]
    usual = statistics.median(per_burst) if per_burst else None
    return TimingSummary(
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


def pace_by_length(traces: Sequence[StreamTrace]) -> dict[int, dict[str, float]]:
    """Returns milliseconds per token by max_tokens: without the time to the first token, and naively with it."""
    paces = {}
    for length in sorted({trace.max_tokens for trace in traces}):
        own = [trace for trace in traces if trace.max_tokens == length and (trace.tokens or 0) > 1 and trace.arrivals]
        if own:
            paces[length] = {
                "ms_per_token": statistics.median(1e3 * each.seconds / (each.num_tokens - 1) for each in own),
                "naive_ms_per_token": statistics.median(1e3 * each.arrivals[-1] / each.num_tokens for each in own),
            }
    return paces


@dataclass(frozen=True, kw_only=True)
class DraftingVerdict:
    answer: Answer
    confidence: float = 0.5  # 0.5 to 1
    source: Literal["metrics", "timing", "nothing"]
    acceptance_length: float | None = None  # counts the recovered or bonus token
    evidence: list[str] = field(default_factory=list)


def judge_drafting(
    counters: EngineCounters | None, predictable: TimingSummary | None, random: TimingSummary | None
) -> DraftingVerdict:
    """Returns the verdict: by `counters` (during the probe) if they are conclusive, else by times."""
    if counters is not None and (verdict := _from_metrics(counters)).answer != "unknown":
        return verdict
    if predictable is None or random is None:
        return DraftingVerdict(answer="unknown", source="nothing", evidence=["nothing was measured"])
    return _from_timing(predictable, random)


def _from_metrics(counters: EngineCounters) -> DraftingVerdict:
    """Returns the verdict by counters; "unknown" if the engine always shows drafting metrics and none was found."""
    length, confidence = counters.acceptance_length, 0.99
    answer: Answer = "off"
    if counters.is_drafting:
        answer = "dead" if length is not None and length < DEAD else "on"
        drafted = counters.drafts or counters.drafted
        said = f"metrics: {drafted:.0f} drafts over both kinds of text" if drafted else "gauge"
        said += "" if length is None else f", acceptance length {length:.2f}"
    elif counters.known:
        confidence, said = 0.97, "metrics count drafts, and there were none"
    elif not counters.exist_without_drafting:
        confidence, said = 0.95, "metrics have nothing on drafts, as without speculation"
    else:
        return DraftingVerdict(answer="unknown", source="metrics")
    evidence = [f"{counters.engine}'s {said}"]
    return DraftingVerdict(
        answer=answer, confidence=confidence, source="metrics", acceptance_length=length, evidence=evidence
    )


def _from_timing(predictable: TimingSummary, random: TimingSummary) -> DraftingVerdict:
    """Returns the verdict by times: adds the log-odds of bursts and of faster predictable text."""
    evidence: list[str] = []
    burst = _burst_odds(predictable, random, evidence)
    pace = _latency_odds(predictable, random, evidence)
    if burst is None and pace is None:
        return DraftingVerdict(answer="unknown", source="timing", evidence=evidence)
    chance = 1 / (1 + math.exp(-((burst or 0.0) + (pace or 0.0))))
    confidence = max(chance, 1 - chance)
    answer: Answer = "unknown" if confidence < MIN_CONFIDENCE else "on" if chance > 0.5 else "off"
    length = predictable.tokens_per_burst if answer == "on" and burst is not None else None
    return DraftingVerdict(
        answer=answer, confidence=confidence, source="timing", acceptance_length=length, evidence=evidence
    )


def _burst_odds(predictable: TimingSummary, random: TimingSummary, evidence: list[str]) -> float | None:
    """Returns log-odds of drafting by burst size, and appends to `evidence`; None if bursts are inconclusive."""
    size, other = predictable.tokens_per_burst, random.tokens_per_burst
    if size is None:
        evidence.append("the text came in one piece: its bursts say nothing")
        return None
    if other is not None and min(size, other) > BATCHED and abs(size - other) < SAME * size:
        evidence.append(f"{size:.2f} tokens come together on any text: the server or a proxy collects them")
        return None
    compared = "" if other is None else f", {other:.2f} of random text"
    evidence.append(f"{size:.2f} tokens of predictable text come together{compared}")
    return max(-BURST_MAX_ODDS, min(BURST_MAX_ODDS, (size - BURST) / BURST_SCALE))


def _latency_odds(predictable: TimingSummary, random: TimingSummary, evidence: list[str]) -> float | None:
    """Returns log-odds of drafting by pace, and appends to `evidence`; None if the time per token is unknown."""
    fast, slow = predictable.ms_per_token, random.ms_per_token
    if not fast or not slow:
        evidence.append("the server does not count its tokens: their pace says nothing")
        return None
    ratio = slow / fast
    evidence.append(f"{fast:.1f} ms a token of predictable text, {slow:.1f} of random ({ratio:.2f} times)")
    return max(-PACE_MIN_ODDS, min(PACE_MAX_ODDS, (ratio - PACE) / PACE_SCALE))
