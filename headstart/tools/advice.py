"""What to do about an acceptance: below LOW a lower depth, with the arithmetic."""

from __future__ import annotations

from collections.abc import Mapping

from headstart.tools.engine_metrics import Counts

LOW = 0.55
"""Share of the drafted tokens that are accepted, below which the deepest of them mostly cost their rows."""
ENOUGH = 100
"""Drafts that a share can be told from."""


def advise(counts: Counts | None, enough: int = ENOUGH) -> str:
    """One sentence or two; empty where nothing is to be done, or fewer drafts than `enough` were counted."""
    if counts is None or not counts.drafts or not counts.drafted or counts.accepted is None or counts.drafts < enough:
        return ""
    share, depth = counts.accepted / counts.drafted, round(counts.drafted / counts.drafts)
    if share >= LOW:
        return ""
    taken = _taken(counts.per_position, counts.drafts, share, depth)
    said = f"{share:.0%} of the drafted tokens are accepted, which is below {LOW:.0%}"
    best = max((k for k in range(1, depth + 1) if sum(taken[:k]) / k >= LOW), default=1)
    now, then = 1 + sum(taken), 1 + sum(taken[:best])
    if best < depth:
        each = ", ".join(f"{one:.2f}" for one in taken)
        sums = f"depth {depth} gives 1 + {' + '.join(f'{one:.2f}' for one in taken)} = {now:.2f} tokens a pass"
        less = f"depth {best} {then:.2f}, with {depth - best} of {depth} drafted rows saved"
        return f"{said}: lower the depth to {best}. A draft at position 1, 2, ... is accepted at {each}: {sums}, {less}"
    entropy = "the text has more entropy than the head can guess: compare with drafting off"
    return f"{said}, at depth 1 already ({then:.2f} tokens a pass); {entropy}"


def _taken(per_position: Mapping[int, float], drafts: float, share: float, depth: int) -> list[float]:
    """How often a draft's first, second, ... token is accepted. Where the engine does not count positions: as if each
    were accepted with the same chance once all before it are."""
    counted = [per_position[place] / drafts for place in sorted(per_position)][:depth]
    if counted:
        return counted + [0.0] * (depth - len(counted))
    low, high = 0.0, 1.0
    for _ in range(40):
        chance = (low + high) / 2
        low, high = (chance, high) if sum(chance**k for k in range(1, depth + 1)) / depth < share else (low, chance)
    return [low**k for k in range(1, depth + 1)]
