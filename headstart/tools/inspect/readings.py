"""Other readings of a block drafter's weights: what config.json may have wrong without any error, only worse drafts.

RoPE style, mask of a block, layer ids off by one (z-lab counts outputs of layers, speculators inputs), and whether the
row of the last token drafts. Each is measured as the file itself was; a reading that drafts better by more than chance
and by SHARE is what the weights were trained with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from headstart.config import MAX_DEPTH
from headstart.heads.base import HeadSpec
from headstart.layers.decoder import tapped_layers
from headstart.stats import DraftStats

SHARE, ERRORS = 0.05, 3.0
"""How much longer an acceptance length must be: as a share, and in standard errors of the difference."""


class Reading(NamedTuple):
    """`what` the weights may be, `fix`: what config.json then must say."""

    what: str
    fix: str
    spec: HeadSpec


def other_readings(spec: HeadSpec, num_layers: int, *, ours: bool = False) -> Iterator[Reading]:
    """Of a block drafter on a trunk of so many layers; none of other heads. `ours`: its config.json is headstart's."""
    block, taps = spec.block, tapped_layers(spec.tap)
    if block is None:
        return

    def made(what: str, fix: str, **changes: Any) -> Reading:
        return Reading(what, fix, replace(spec, block=replace(block, **changes)))

    style = "half-split" if block.interleaved else "interleaved"
    rope = f'"interleaved": {_json(not block.interleaved)}' if ours else f'"is_neox_style": {_json(block.interleaved)}'
    yield made(f"a RoPE that is {style}", rope, interleaved=not block.interleaved)
    causal = not block.all_causal
    how = "causally" if causal else "both ways"
    mask = f'"{"causal" if ours else "is_causal"}": {_json(causal)}'
    yield made(f"rows that see their block {how}", mask, causal=causal, causal_windows=causal)
    for step in (1, -1):
        moved = tuple(layer + step for layer in taps)
        if moved[0] >= 0 and moved[-1] < num_layers:
            what = f"layer ids that are {'one higher' if step == 1 else 'one lower'}"
            yield Reading(what, f"add {step} to each of its layer ids", replace(spec, tap=moved))
    rows = block.rows_for(block.block_size)
    if drafts := min(rows - block.anchor_predicts, MAX_DEPTH):
        anchor = not block.anchor_predicts
        what = f"a first row that drafts {'too' if anchor else 'nothing'}"
        fix = f'"{"anchor_predicts" if ours else "sample_from_anchor"}": {_json(anchor)}'
        yield made(what, fix, anchor_predicts=anchor, block_size=drafts)


def _json(value: bool) -> str:
    return str(value).lower()


def gains(other: DraftStats, told: DraftStats) -> bool:
    """Does another reading draft better than what the file says, be it by chance?"""
    return other.acceptance_length > (1 + SHARE) * told.acceptance_length


def is_better(other: DraftStats, told: DraftStats) -> bool:
    """Does it so beyond chance?"""
    gain = other.acceptance_length - told.acceptance_length
    return gains(other, told) and gain > ERRORS * math.sqrt(_variance(other) + _variance(told))


def _variance(stats: DraftStats) -> float:
    """Of the mean number of accepted tokens: per_position counts the drafts that got so far."""
    if not stats.drafts:
        return 0.0
    mean = stats.accepted / stats.drafts
    square = sum((2 * i + 1) * hits for i, hits in enumerate(stats.per_position)) / stats.drafts
    return (square - mean**2) / stats.drafts
