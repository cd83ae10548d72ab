"""Arrival times of streamed answers, and the verdict from times or metrics: is drafting on?

Pure functions, so that recorded traces can be judged again.
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
SAME_BURST = 0.2  # gaps below this share of the longest usual gap (their 90th percentile) are inside a burst
DEAD = 1.02  # acceptance lengths below this: drafts are made and none is taken
MIN_CONFIDENCE = 0.7  # confidence from which an answer is given
BURST, BURST_SCALE, BURST_MAX_ODDS = 1.2, 0.06, 4.0
"""Tokens a burst at which drafting is as likely as not, how fast the log-odds grow from there, and their limit."""
PACE, PACE_SCALE, PACE_MIN_ODDS, PACE_MAX_ODDS = 1.15, 0.1, 1.5, 2.0
"""The same of random against predictable text, in time a token. Drafting may be on and save nothing."""
SAME, BATCHED = 0.05, 1.5
"""Bursts of one size on any text, this large: a server that sends every few tokens, or a proxy that buffers."""


@dataclass(frozen=True, kw_only=True)
class StreamTrace:
    kind: Kind
    max_tokens: int
    tokens: int | None  # None: the server does not count them
    arrivals: tuple[float, ...]  # of pieces of text, in seconds since the request

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self.arrivals)]

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
        """From the first piece to the last, without the time to the first token."""
        return self.arrivals[-1] - self.arrivals[0] if self.arrivals else 0.0

    @property
    def num_tokens(self) -> int:
        """Pieces stand for tokens where the server does not count them."""
        return self.tokens if self.tokens is not None else len(self.arrivals)


@dataclass(frozen=True, kw_only=True)
class TimingSummary:
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
        return {name: _rounded(value) for name, value in vars(self).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_rounded, value))
    return round(value, 3) if isinstance(value, float) else value


def quantile(values: Sequence[float], share: float) -> float:
    """Returns a quantile of a non-empty list, without interpolation."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def summarize(traces: Sequence[StreamTrace]) -> TimingSummary:
    """Medians over traces. The first piece is the prompt's: n tokens in m bursts are (n - 1) / (m - 1) a step."""
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
    """Milliseconds a token by the number asked for: without the first token's time, and as a naive test divides."""
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
    """`counters`: what metrics counted while the text was made. They win over times where they tell."""
    if counters is not None and (verdict := _from_metrics(counters)).answer != "unknown":
        return verdict
    if predictable is None or random is None:
        return DraftingVerdict(answer="unknown", source="nothing", evidence=["nothing was measured"])
    return _from_timing(predictable, random)


def _from_metrics(counters: EngineCounters) -> DraftingVerdict:
    """Counters that moved, stood still, or are not there."""
    length, confidence = counters.acceptance_length, 0.99
    answer: Answer = "off"
    if counters.is_drafting:
        answer = "dead" if length is not None and length < DEAD else "on"
        drafted = counters.drafts or counters.drafted
        said = f"metrics: {drafted:.0f} drafts over both kinds of text" if drafted else "gauge"
        said += "" if length is None else f", acceptance length {length:.2f}"
    elif counters.known:
        confidence, said = 0.97, "metrics count drafts, and there were none"
    elif not counters.always_there:
        confidence, said = 0.95, "metrics have nothing on drafts, as without speculation"
    else:
        return DraftingVerdict(answer="unknown", source="metrics")
    told = [f"{counters.engine}'s {said}"]
    return DraftingVerdict(
        answer=answer, confidence=confidence, source="metrics", acceptance_length=length, evidence=told
    )


def _from_timing(predictable: TimingSummary, random: TimingSummary) -> DraftingVerdict:
    """Adds the log-odds of two signs: tokens that come together, and predictable text that comes faster."""
    evidence: list[str] = []
    burst = _burst_odds(predictable, random, evidence)
    pace = _pace_odds(predictable, random, evidence)
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
    """Returns log-odds of drafting; None where bursts say nothing."""
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


def _pace_odds(predictable: TimingSummary, random: TimingSummary, evidence: list[str]) -> float | None:
    """Returns log-odds of drafting; None where times a token are unknown."""
    fast, slow = predictable.ms_per_token, random.ms_per_token
    if not fast or not slow:
        evidence.append("the server does not count its tokens: their pace says nothing")
        return None
    ratio = slow / fast
    evidence.append(f"{fast:.1f} ms a token of predictable text, {slow:.1f} of random ({ratio:.2f} times)")
    return max(-PACE_MIN_ODDS, min(PACE_MAX_ODDS, (ratio - PACE) / PACE_SCALE))
