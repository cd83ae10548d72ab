"""Do engines that were started draft? They are warmed up with text that is easy to guess, and tell by their metrics."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headstart.core import Progress
from headstart.tools.advice import advise
from headstart.tools.engine_metrics import Counts
from headstart.tools.launch.launcher import Wanted
from headstart.tools.launch.start import Part, Running
from headstart.tools.probe.endpoint import Endpoint
from headstart.tools.probe.run import PREDICTABLE

WARM_TOKENS = 64
FEW = 10
"""Drafts that tell something of text as easy as the warm-up's."""


def check(running: Running, wanted: Wanted, progress: Progress) -> dict[str, Any]:
    """What all engines that should draft counted while they wrote, and each of several for itself."""
    depth = 0 if wanted.role == "prefill" else wanted.depth
    front = Endpoint(running.front.server)
    drafting = [part for part in running.engines if part.step.role != "prefill"]
    divided = len(drafting) < len(running.engines)
    asked = [front] if divided else [Endpoint(part.server, front.model) for part in drafting]
    before = [_metrics(part, front) for part in drafting]
    tokens = 0
    for number, endpoint in enumerate(asked):
        for done, prompt in enumerate(PREDICTABLE):
            progress(number * len(PREDICTABLE) + done, len(asked) * len(PREDICTABLE), "warming up")
            tokens += endpoint.stream("predictable", prompt, WARM_TOKENS, 0.0).tokens or 0
    if len(running.parts) > 1 and not divided:  # the way through the router
        front.stream("predictable", PREDICTABLE[0], WARM_TOKENS, 0.0)
    now = [
        _settled(part, front, then) if depth else _metrics(part, front)
        for part, then in zip(drafting, before, strict=True)
    ]
    each = [_since(then, seen) for then, seen in zip(before, now, strict=True)]
    found = _told(_summed(each), tokens)
    if len(drafting) > 1:
        servers = {part.name: _told(counts, None) for part, counts in zip(drafting, each, strict=True)}
        dead = [name for name, told in servers.items() if not told["alive"]]
        found |= {"servers": servers, "alive": not dead}
        if dead and not found["why"]:
            found["why"] = f"the metrics of {', '.join(dead)} count no accepted drafts"
    return found


def _metrics(part: Part, front: Endpoint) -> Counts | None:
    return Endpoint(part.server, front.model).metrics()


def _since(before: Counts | None, now: Counts | None) -> Counts | None:
    return now.since(before) if now and before else now


def _settled(part: Part, front: Endpoint, before: Counts | None) -> Counts | None:
    """Some engines count with a delay: look again for a few seconds while nothing has moved."""
    for _ in range(10):
        now = _metrics(part, front)
        if now is None or (before is not None and now != before) or (before is None and now.active):
            return now
        time.sleep(0.3)
    return _metrics(part, front)


def _summed(each: Sequence[Counts | None]) -> Counts | None:
    """Counts of several servers as one; a gauge is no count, and stays that of the first."""
    if any(counts is None for counts in each):
        return None
    first, *others = (counts for counts in each if counts is not None)
    for counts in others:
        places = {*first.per_position, *counts.per_position}
        first = replace(
            first,
            drafts=_sum(first.drafts, counts.drafts),
            drafted=_sum(first.drafted, counts.drafted),
            accepted=_sum(first.accepted, counts.accepted),
            per_position={p: first.per_position.get(p, 0.0) + counts.per_position.get(p, 0.0) for p in sorted(places)},
        )
    return first


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


def _told(counts: Counts | None, tokens: int | None) -> dict[str, Any]:
    if counts is None:
        unknown = "it shows no metrics that are known"
        return {"alive": False, "acceptance_length": None, "tokens": tokens, "why": unknown}
    length = counts.acceptance_length
    return {
        "alive": counts.active and (length is None or length > 1.0),
        "acceptance_length": length,
        "tokens": tokens,
        "drafts": counts.drafts,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "per_position": counts.per_position,
        "advice": advise(counts, FEW),
        "why": "" if counts.active else "its metrics count no drafts",
    }
