"""Measures a head's acceptance rate (`headstart inspect --deep`).

A model that fits into memory answers the built-in prompts greedily: an MTP head drafts at depth 1, 2 and 3, a block
drafter its whole block. The trunk decides every token, so each draft follows a correct context. A larger model reads
built-in texts once, layer by layer (forced.py). A head is also measured with other readings of its weights, since a
wrong value in config.json and a wrong conversion cause no error. Of an MTP head: readings.py. Of a block drafter: RoPE
style, attention mask within a block, layer ids off by one (z-lab counts outputs of layers, speculators inputs), and
whether the row of the last token drafts.
"""

import math
from dataclasses import astuple, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart import hub, machine
from headstart.config import EngineConfig
from headstart.core import Progress
from headstart.errors import HeadstartError, ModelError
from headstart.formats import open_checkpoint
from headstart.formats.json_object import read_object
from headstart.heads.base import Head
from headstart.heads.published import MARK
from headstart.stats import DraftStats
from headstart.tools.prompts import builtin_prompts, measure_acceptance

if TYPE_CHECKING:
    from headstart.engine.load import Model
    from headstart.tools.inspect.forced import SavedStates
    from headstart.tools.inspect.forced_head import Counts, TeacherForcedHead
    from headstart.tools.inspect.readings import HeadReading

DEPTHS = (1, 2, 3)
TOKENS = 40  # longest answer to each prompt
LONGER = 5
"""Factor of the text length when another setting drafts better, but perhaps by chance. (A wrong RoPE may cost only
a tenth of the acceptance length.)"""
DEAD_BELOW = 0.05  # acceptance of first draft tokens below which a head counts as dead


def measure(model: str | None, head: str | None, progress: Progress) -> dict[str, Any]:
    """Measures acceptance by depth and position. `ran` is false, with the reason in `why`, if the model or head cannot
    run here. `better`: a setting with which the head drafts better than with its config.json, or None."""
    from headstart.engine.load import load_model, memory_needed

    try:
        config = EngineConfig(head=head)
        streamed = memory_needed(open_checkpoint(hub.resolve(model))) > machine.memory().available
        loaded = load_model(model, config, streamed=streamed)
        if loaded.head is None:
            return {"ran": False, "why": "the model has no head that headstart can run"}
        return _measure_streamed(loaded, progress) if streamed else _measure(loaded, config, progress)
    except HeadstartError as error:
        return {"ran": False, "why": error.message}


MeasuredReading = tuple["HeadReading", DraftStats]


def _measure_streamed(model: "Model", progress: Progress) -> dict[str, Any]:
    """Measures a model that does not fit into memory: the built-in texts go through it layer by layer."""
    from headstart.tools.inspect.forced import SavedStates, builtin_texts, run_trunk
    from headstart.tools.inspect.forced_head import TeacherForcedHead, can_force

    assert model.head
    if not can_force(model.head):
        kind = model.head.spec.kind
        raise ModelError(f"the model does not fit into memory; {kind} heads are measured with models that do")
    texts = builtin_texts(model)
    saved = SavedStates.of(model, texts)
    forced = TeacherForcedHead(run_trunk(model, texts, progress, saved))
    depth = min(DEPTHS[-1], model.head.spec.depth_limit)
    progress(0, 1, "measuring acceptance")
    counts = _counts(forced, saved, model.head, "", depth)
    readings = _measure_readings(model, forced, progress, saved)
    saved.remove()
    rows = [
        {"depth": each, "acceptance_length": counts.acceptance_length(each), "per_position": counts.rates[:each]}
        for each in DEPTHS[:depth]
    ]
    return _document(model.head, rows, sum(counts.tries), counts.first(), readings, _best(readings, counts.first()))


def _counts(
    forced: "TeacherForcedHead", saved: "SavedStates | None", head: Head, what: str, depth: int = 1
) -> "Counts":
    """Counts of drafts with one reading (`what`; empty: as written). `saved` keeps them after an interruption."""
    from headstart.tools.inspect.forced_head import Counts

    if saved is None:
        return forced.counts(head, depth)
    found = saved.counted(what, lambda: [list(each) for each in astuple(forced.counts(head, depth))])
    return Counts(*map(tuple, found))


def _measure_readings(
    model: "Model", forced: "TeacherForcedHead", progress: Progress, saved: "SavedStates | None" = None
) -> list[MeasuredReading]:
    """First drafts over the same texts with each other reading of an MTP head."""
    from headstart.tools.inspect.readings import mtp_readings

    readings, others = [], list(mtp_readings(model))
    for done, other in enumerate(others):
        progress(done, len(others), f"measuring acceptance with {other.description}")
        readings.append((other, _counts(forced, saved, other.head(), other.description).first()))
    return readings


def _measure(model: "Model", config: EngineConfig, progress: Progress) -> dict[str, Any]:
    from headstart.api import LLM
    from headstart.tools.inspect.forced import builtin_texts, run_trunk
    from headstart.tools.inspect.forced_head import TeacherForcedHead

    assert model.head
    drafter = LLM(model, replace(config, depth=1)).engine.drafting.drafter
    deepest = drafter.max_depth if drafter else 0
    depths = [deepest] if model.head.spec.block else [depth for depth in DEPTHS if depth <= deepest]
    done = count(1)
    whole = len(builtin_prompts()) * len(depths)

    def tried(depth: int) -> DraftStats:
        llm = LLM(model, replace(config, depth=depth))
        what = f"measuring acceptance at depth {depth}"
        return measure_acceptance(llm, TOKENS, lambda: progress(next(done), whole, what))

    every = [tried(depth) for depth in depths]
    if model.head.spec.block:
        every[-1], readings, best = _measure_block_readings(model, config, every[-1], progress)
        as_published = every[-1]
    elif model.head.spec.kind == "mtp":
        forced = TeacherForcedHead(run_trunk(model, builtin_texts(model), progress))
        as_published, readings = forced.counts(model.head).first(), _measure_readings(model, forced, progress)
        best = _best(readings, as_published)
    else:
        as_published, readings, best = DraftStats(), [], None
    rows: list[dict[str, Any]] = [
        {"depth": depth, "acceptance_length": stats.acceptance_length, "per_position": _rates(stats)}
        for depth, stats in zip(depths, every, strict=True)
    ]
    return _document(model.head, rows, sum(stats.emitted for stats in every), as_published, readings, best)


def _measure_block_readings(
    model: "Model", config: EngineConfig, as_published: DraftStats, progress: Progress
) -> tuple[DraftStats, list[MeasuredReading], MeasuredReading | None]:
    """(drafts with config.json's settings, with each other setting, with the best if it is better) of a block drafter.
    A difference that may be chance is measured again over longer texts."""
    from headstart.api import LLM
    from headstart.tools.inspect.readings import block_readings, rebuilt

    head = model.head
    assert head
    written = Path(head.source) / "config.json"
    ours = written.is_file() and MARK in read_object(written)
    others = list(block_readings(head.spec, model.config.num_layers, partial(rebuilt, model, head), ours=ours))
    texts, done = len(builtin_prompts()), count(1)
    whole = [texts * len(others)]

    def tried(head: Head, what: str, tokens: int = TOKENS) -> DraftStats:
        llm = LLM(replace(model, head=head), replace(config, depth=head.spec.depth_limit))
        return measure_acceptance(llm, tokens, lambda: progress(next(done), whole[0], f"measuring acceptance {what}"))

    readings = [(each, tried(each.head(), f"with {each.description}")) for each in others]
    best = _best(readings, as_published)
    if best is None and (likely := [place for place, (_, stats) in enumerate(readings) if gains(stats, as_published)]):
        place = max(likely, key=lambda place: readings[place][1].acceptance_length)
        whole[0] += 2 * texts
        as_published = tried(head, "on longer texts", LONGER * TOKENS)
        longer = tried(others[place].head(), f"with {others[place].description}", LONGER * TOKENS)
        readings[place] = (others[place], longer)
        best = _best([readings[place]], as_published)
    return as_published, readings, best


def _best(readings: list[MeasuredReading], as_published: DraftStats) -> MeasuredReading | None:
    """The best of the readings that draft better than the head as written; None if none does."""
    better = [each for each in readings if is_better(each[1], as_published)]
    return max(better, key=lambda each: each[1].acceptance_length, default=None)


def _document(
    head: Head, rows: list[dict[str, Any]], tokens: int, as_published: DraftStats, readings: list[MeasuredReading],
    best: MeasuredReading | None,
) -> dict[str, Any]:  # fmt: skip
    """The result of `measure`. as_published: drafts of the head without another reading, the baseline of `readings`."""
    first = rows[0]["per_position"][0] if rows and rows[0]["per_position"] else 0.0
    return {
        "ran": True,
        "method": head.spec.kind,
        "tokens": tokens,
        "acceptance": first,
        "dead": first < DEAD_BELOW and best is None,
        "depths": rows,
        "readings": [
            {"what": each.description, "acceptance_length": stats.acceptance_length} for each, stats in readings
        ],
        "better": best and {
            "what": best[0].description, "fix": best[0].suggestion, "acceptance_length": best[1].acceptance_length,
            "instead_of": as_published.acceptance_length,
        },
    }  # fmt: skip


def _rates(stats: DraftStats) -> list[float]:
    """Returns for each position the share of drafts reaching it whose token there was accepted."""
    return [hits / tries for hits, tries in zip(stats.per_position, stats.drafted_at, strict=True)]


SHARE, ERRORS = 0.05, 3.0
"""Required gain in acceptance length of another setting: relative, and in standard errors of the difference."""


def gains(other: DraftStats, as_published: DraftStats) -> bool:
    """Returns whether `other` has a longer acceptance length than `as_published` (config.json's setting), by SHARE."""
    return other.acceptance_length > (1 + SHARE) * as_published.acceptance_length


def is_better(other: DraftStats, as_published: DraftStats) -> bool:
    """Returns whether `other` has a significantly longer acceptance length than `as_published`."""
    gain = other.acceptance_length - as_published.acceptance_length
    return gains(other, as_published) and gain > ERRORS * math.sqrt(_variance(other) + _variance(as_published))


def _variance(stats: DraftStats) -> float:
    """Returns the variance of the mean number of accepted tokens per draft."""
    if not stats.drafts:
        return 0.0
    mean = stats.accepted / stats.drafts
    square = sum((2 * i + 1) * hits for i, hits in enumerate(stats.per_position)) / stats.drafts
    return (square - mean**2) / stats.drafts
