"""From what was measured to an answer: a pure function, so that recorded traces can be judged again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from headstart.tools.engine_metrics import Counts
from headstart.tools.probe.traces import Summary

Answer = Literal["on", "dead", "off", "unknown"]
DEAD = 1.02
"""Acceptance lengths below this: drafts are made and none is taken."""
SURE = 0.7
"""Confidence from which an answer is given."""
BURST, BURST_SCALE, BURST_MOST = 1.2, 0.06, 4.0
"""Tokens a burst at which drafting is as likely as not, how fast odds grow from there, and the most they say."""
PACE, PACE_SCALE, PACE_LEAST, PACE_MOST = 1.15, 0.1, 1.5, 2.0
"""The same of random against predictable text, in time a token. Drafting may be on and save nothing."""
SAME, BATCHED = 0.05, 1.5
"""Bursts of one size on any text, this large: a server that sends every few tokens, or a proxy that buffers."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """`confidence` of the answer, 0.5 to 1; `acceptance_length` counts the recovered or bonus token."""

    answer: Answer
    confidence: float
    source: Literal["metrics", "timing", "nothing"]
    acceptance_length: float | None = None
    evidence: list[str] = field(default_factory=list)


def decide(counts: Counts | None, predictable: Summary | None, random: Summary | None) -> Diagnosis:
    """`counts`: what metrics counted while the text was made. They win over times where they tell."""
    if counts is not None:
        verdict = from_metrics(counts)
        if verdict.answer != "unknown":
            return verdict
    if predictable is None or random is None:
        return Diagnosis(answer="unknown", confidence=0.5, source="nothing", evidence=["nothing was measured"])
    return from_timing(predictable, random)


def from_metrics(counts: Counts) -> Diagnosis:
    """Counters that moved, stood still, or are not there."""
    length = counts.acceptance_length
    answer: Answer = "off"
    if counts.active:
        answer, confidence = "dead" if length is not None and length < DEAD else "on", 0.99
        drafted = counts.drafts or counts.drafted
        said = f"metrics: {drafted:.0f} drafts over both kinds of text" if drafted else "gauge"
        said += "" if length is None else f", acceptance length {length:.2f}"
    elif counts.known:
        length, confidence, said = None, 0.97, "metrics count drafts, and there were none"
    elif not counts.always_there:
        length, confidence, said = None, 0.95, "metrics have nothing on drafts, as without speculation"
    else:
        return Diagnosis(answer="unknown", confidence=0.5, source="metrics")
    evidence = [f"{counts.engine}'s {said}"]
    return Diagnosis(
        answer=answer, confidence=confidence, source="metrics", acceptance_length=length, evidence=evidence
    )


def from_timing(predictable: Summary, random: Summary) -> Diagnosis:
    """Log-odds of two signs, added: tokens that come together, and predictable text that comes faster."""
    evidence: list[str] = []
    burst = _from_bursts(predictable, random, evidence)
    pace = _from_pace(predictable, random, evidence)
    if burst is None and pace is None:
        return Diagnosis(answer="unknown", confidence=0.5, source="timing", evidence=evidence)
    share = 1 / (1 + math.exp(-((burst or 0.0) + (pace or 0.0))))
    confidence = max(share, 1 - share)
    answer: Answer = "unknown" if confidence < SURE else "on" if share > 0.5 else "off"
    length = predictable.tokens_per_burst if answer == "on" and burst is not None else None
    return Diagnosis(answer=answer, confidence=confidence, source="timing", acceptance_length=length, evidence=evidence)


def _from_bursts(predictable: Summary, random: Summary, evidence: list[str]) -> float | None:
    """None where bursts say nothing."""
    size, other = predictable.tokens_per_burst, random.tokens_per_burst
    if size is None:
        evidence.append("the text came in one piece: its bursts say nothing")
        return None
    if other is not None and min(size, other) > BATCHED and abs(size - other) < SAME * size:
        evidence.append(f"{size:.2f} tokens come together on any text: the server or a proxy collects them")
        return None
    compared = "" if other is None else f", {other:.2f} of random text"
    evidence.append(f"{size:.2f} tokens of predictable text come together{compared}")
    return max(-BURST_MOST, min(BURST_MOST, (size - BURST) / BURST_SCALE))


def _from_pace(predictable: Summary, random: Summary, evidence: list[str]) -> float | None:
    if not predictable.ms_per_token or not random.ms_per_token:
        evidence.append("the server does not count its tokens: their pace says nothing")
        return None
    ratio = random.ms_per_token / predictable.ms_per_token
    evidence.append(
        f"{predictable.ms_per_token:.1f} ms a token of predictable text, {random.ms_per_token:.1f} of random "
        f"({ratio:.2f} times)"
    )
    return max(-PACE_LEAST, min(PACE_MOST, (ratio - PACE) / PACE_SCALE))
