"""From a server's counts to a depth: what the last drafted tokens of a pass bring, and what they cost."""

from __future__ import annotations

from headstart.tools.engine_metrics import Counts

LOW = 0.55
"""Accepted of drafted tokens below which deep drafts cost more than they bring, in published guides and here."""


def depth_advice(counts: Counts) -> str:
    """Empty where the depth is right or nothing was counted."""
    if not counts.drafts or not counts.drafted or counts.accepted is None:
        return ""
    depth, rate = round(counts.drafted / counts.drafts), counts.accepted / counts.drafted
    if rate >= LOW or depth < 1:
        return ""
    chances = accepted_by_place(counts, depth)
    said = f"acceptance {rate:.2f} is below {LOW:.2f} at depth {depth}"
    if depth == 1:
        return (
            f"{said}: a pass gives {1 + chances[0]:.2f} tokens, which pays only while a draft and its row cost less "
            f"than {chances[0]:.0%} of a pass: compare with --depth 0"
        )
    better = next((fewer for fewer in range(depth - 1, 0, -1) if sum(chances[:fewer]) >= LOW * fewer), 1)
    dropped, all_of, kept = depth - better, 1 + sum(chances), 1 + sum(chances[:better])
    last = "the last token of each draft brings" if dropped == 1 else f"the last {dropped} tokens of each draft bring"
    return (
        f"{said}: {last} {all_of - kept:.2f} of {all_of:.2f} tokens a pass, for {dropped} of {depth} draft steps and "
        f"rows: --depth {better} ({kept:.2f} tokens a pass)"
    )


def accepted_by_place(counts: Counts, depth: int) -> list[float]:
    """The share of drafts whose token at each place was accepted; where places are not counted, by one chance for all
    that gives as many."""
    drafts, accepted = counts.drafts or 1.0, counts.accepted or 0.0
    if counts.per_position:
        return [counts.per_position.get(place, 0.0) / drafts for place in range(depth)]
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        more = sum(middle**place for place in range(1, depth + 1)) * drafts > accepted
        low, high = (low, middle) if more else (middle, high)
    return [low**place for place in range(1, depth + 1)]
