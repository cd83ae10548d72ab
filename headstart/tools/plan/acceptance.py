"""How often drafts stand: conditional acceptances by position, and the tokens that a step is expected to give."""

from __future__ import annotations

from collections.abc import Sequence

from headstart.config import MAX_DEPTH
from headstart.errors import UsageError

DEFAULT = (0.8, 0.7, 0.6)
LENGTH_DEPTH = 3
"""An acceptance length that comes without a depth is one of this depth."""


def expected_tokens(acceptances: Sequence[float], depth: int) -> float:
    """1 + sum over i <= depth of the product of the first i conditional acceptances; the last one given stands for
    all later positions."""
    total, product = 1.0, 1.0
    for position in range(depth):
        product *= acceptances[min(position, len(acceptances) - 1)]
        total += product
    return total


def of_lengths(lengths: Sequence[float]) -> tuple[float, ...]:
    """Conditional acceptances from acceptance lengths at depth 1, 2, ...: the share that position i adds, over the
    share before it. Lengths were measured apart, so a share that would grow is cut at 1."""
    cumulative = [length - before for length, before in zip(lengths, (1.0, *lengths), strict=False)]
    shares = zip(cumulative, (1.0, *cumulative), strict=False)
    return tuple(min(1.0, max(0.0, share / before)) if before > 0 else 0.0 for share, before in shares)


def of_length(length: float, depth: int) -> tuple[float]:
    """The one acceptance that gives an acceptance length at a depth. Raises UsageError for a length out of reach."""
    if not 1 <= length <= depth + 1:
        what = f"--acceptance {length:g} is an acceptance length, but depth {depth} gives 1 to {depth + 1}"
        raise UsageError(what, "give --depth as well, or acceptances by position such as 0.85,0.7,0.6")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens((middle,), depth) < length else (low, middle)
    return (high,)


def parse(text: str, depths: Sequence[int]) -> tuple[tuple[float, ...], str]:
    """'0.85,0.7,0.6' (conditional, by position) or '2.5' (an acceptance length at the one depth given, else at
    LENGTH_DEPTH); with what it means. Raises UsageError for anything else."""
    try:
        values = tuple(float(each) for each in text.split(","))
    except ValueError:
        raise UsageError(f"--acceptance is {text!r}, which is not numbers", "for example 0.85,0.7,0.6 or 2.5") from None
    if len(values) == 1 and values[0] > 1:
        depth = depths[0] if len(depths) == 1 and depths[0] else LENGTH_DEPTH
        acceptances = of_length(values[0], depth)
        return acceptances, f"acceptance length {values[0]:g} at depth {depth}: {acceptances[0]:.3f} at every position"
    if not all(0 <= value <= 1 for value in values):
        raise UsageError(f"--acceptance is {text!r}, but shares lie between 0 and 1", "for example 0.85,0.7,0.6")
    if len(values) > MAX_DEPTH:
        raise UsageError(f"--acceptance has {len(values)} positions, but depths go to {MAX_DEPTH}")
    return values, f"acceptances {', '.join(f'{value:g}' for value in values)} by position, as given; the last goes on"
