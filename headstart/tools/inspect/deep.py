"""Measures a head's acceptance rate over greedy texts of the built-in prompts (`headstart inspect --deep`).

An MTP head drafts at depth 1, 2 and 3, a block drafter its whole block. The trunk decides every token, so each draft
follows a correct context. A block drafter is also measured with other settings, since a wrong value in config.json
causes no error: RoPE style, attention mask within a block, layer ids off by one (z-lab counts outputs of layers,
speculators inputs), and whether the row of the last token drafts.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headstart.config import MAX_DEPTH, EngineConfig
from headstart.core import Progress
from headstart.errors import HeadstartError
from headstart.formats.json_object import read_object
from headstart.heads.base import Head, HeadSpec
from headstart.heads.published import MARK
from headstart.layers.decoder import tapped_layers
from headstart.stats import DraftStats
from headstart.tools.prompts import builtin_prompts, measure_acceptance

if TYPE_CHECKING:
    from headstart.engine.load import Model

DEPTHS = (1, 2, 3)
TOKENS = 40  # longest answer to each prompt
LONGER = 5
"""Factor of the text length when another setting drafts better, but perhaps by chance. (A wrong RoPE may cost only
a tenth of the acceptance length.)"""
DEAD_BELOW = 0.05  # acceptance of first draft tokens below which a head counts as dead


def measure(model: str | None, head: str | None, progress: Progress) -> dict[str, Any]:
    """Measures acceptance by depth and position. `ran` is false, with the reason in `why`, if the model or head cannot
    run here. `better`: a setting with which the head drafts better than with its config.json, or None."""
    from headstart.engine.load import load_model

    try:
        config = EngineConfig(head=head)
        loaded = load_model(model, config)
        if loaded.head is None:
            return {"ran": False, "why": "the model has no head that headstart can run"}
        return _measure(loaded, config, progress)
    except HeadstartError as error:
        return {"ran": False, "why": error.message}


def _measure(model: "Model", config: EngineConfig, progress: Progress) -> dict[str, Any]:
    from headstart.api import LLM

    assert model.head
    drafter = LLM(model, replace(config, depth=1)).engine.drafting.drafter
    deepest = drafter.max_depth if drafter else 0
    depths = [deepest] if model.head.spec.block else [depth for depth in DEPTHS if depth <= deepest]
    written = Path(model.head.source) / "config.json"
    ours = written.is_file() and MARK in read_object(written)
    others = list(other_readings(model.head.spec, model.config.num_layers, ours=ours))
    texts = len(builtin_prompts())
    done, whole = count(1), [texts * (len(depths) + len(others))]

    def tried(head: Head, depth: int, what: str, tokens: int = TOKENS) -> DraftStats:
        llm = LLM(replace(model, head=head), replace(config, depth=depth))
        return measure_acceptance(llm, tokens, lambda: progress(next(done), whole[0], f"measuring acceptance {what}"))

    every = [tried(model.head, depth, f"at depth {depth}") for depth in depths]
    read = [tried(_read_as(model, each.spec), each.spec.depth_limit, f"with {each.what}") for each in others]
    pairs = list(zip(others, read, strict=True))
    better = [pair for pair in pairs if is_better(pair[1], every[-1])]
    if not better and (likely := [pair for pair in pairs if gains(pair[1], every[-1])]):
        each = max(likely, key=lambda pair: pair[1].acceptance_length)[0]
        whole[0] += 2 * texts
        every[-1] = tried(model.head, depths[-1], "on longer texts", LONGER * TOKENS)
        found = tried(_read_as(model, each.spec), each.spec.depth_limit, f"with {each.what}", LONGER * TOKENS)
        pairs = [(other, found if other is each else stats) for other, stats in pairs]
        better = [(each, found)] if is_better(found, every[-1]) else []
    best = max(better, key=lambda pair: pair[1].acceptance_length, default=None)
    rows: list[dict[str, Any]] = [
        {"depth": depth, "acceptance_length": stats.acceptance_length, "per_position": _rates(stats)}
        for depth, stats in zip(depths, every, strict=True)
    ]
    first = rows[0]["per_position"][0] if rows and rows[0]["per_position"] else 0.0
    return {
        "ran": True,
        "method": model.head.spec.kind,
        "tokens": sum(stats.emitted for stats in every),
        "acceptance": first,
        "dead": first < DEAD_BELOW and best is None,
        "depths": rows,
        "readings": [{"what": each.what, "acceptance_length": stats.acceptance_length} for each, stats in pairs],
        "better": best and {"what": best[0].what, "fix": best[0].fix, "acceptance_length": best[1].acceptance_length},
    }


def _read_as(model: "Model", spec: HeadSpec) -> Head:
    from headstart.engine.load import fit_head
    from headstart.heads.files import read_head

    assert model.head
    path = Path(model.head.source)
    return fit_head(model, replace(read_head(path), spec=spec), path)


def _rates(stats: DraftStats) -> list[float]:
    """Returns for each position the share of drafts reaching it whose token there was accepted."""
    return [hits / tries for hits, tries in zip(stats.per_position, stats.drafted_at, strict=True)]


SHARE, ERRORS = 0.05, 3.0
"""Required gain in acceptance length of another setting: relative, and in standard errors of the difference."""


class Reading(NamedTuple):
    """Another way to interpret a block drafter's weights."""

    what: str  # description, such as "a RoPE that is interleaved"
    fix: str  # the change of config.json
    spec: HeadSpec


def other_readings(spec: HeadSpec, num_layers: int, *, ours: bool = False) -> Iterator[Reading]:
    """Yields other settings of a block drafter on a trunk of `num_layers`; none for other heads. `ours`: config.json is
    in headstart's format, which decides the spelling of `fix`."""
    block, taps = spec.block, tapped_layers(spec.tap)
    if block is None:
        return

    def made(what: str, fix: str, **changes: Any) -> Reading:
        return Reading(what, fix, replace(spec, block=replace(block, **changes)))

    style = "half-split" if block.interleaved else "interleaved"
    rope = json.dumps({"interleaved": not block.interleaved} if ours else {"is_neox_style": block.interleaved})[1:-1]
    yield made(f"a RoPE that is {style}", rope, interleaved=not block.interleaved)
    causal = not block.all_causal
    how = "causally" if causal else "both ways"
    mask = f'"{"causal" if ours else "is_causal"}": {json.dumps(causal)}'
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
        fix = f'"{"anchor_predicts" if ours else "sample_from_anchor"}": {json.dumps(anchor)}'
        yield made(what, fix, anchor_predicts=anchor, block_size=drafts)


def gains(other: DraftStats, told: DraftStats) -> bool:
    """Returns whether `other` has a longer acceptance length than `told` (config.json's setting), by SHARE."""
    return other.acceptance_length > (1 + SHARE) * told.acceptance_length


def is_better(other: DraftStats, told: DraftStats) -> bool:
    """Returns whether `other` has a significantly longer acceptance length than `told`."""
    gain = other.acceptance_length - told.acceptance_length
    return gains(other, told) and gain > ERRORS * math.sqrt(_variance(other) + _variance(told))


def _variance(stats: DraftStats) -> float:
    """Returns the variance of the mean number of accepted tokens per draft."""
    if not stats.drafts:
        return 0.0
    mean = stats.accepted / stats.drafts
    square = sum((2 * i + 1) * hits for i, hits in enumerate(stats.per_position)) / stats.drafts
    return (square - mean**2) / stats.drafts
