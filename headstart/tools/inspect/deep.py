"""Acceptance measured, not read: greedy texts of the built-in prompts, drafted with the head at depth 1, 2 and 3, or
with a block drafter's whole block, whose other readings (readings.py) are then tried too.

The trunk decides every token, so each draft is judged after a true context: the acceptance is teacher-forced.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.core import Progress
from headstart.errors import HeadstartError
from headstart.formats.json_object import read_object
from headstart.stats import DraftStats
from headstart.tools.prompts import builtin_prompts

if TYPE_CHECKING:
    from headstart.config import EngineConfig
    from headstart.engine.load import Model
    from headstart.heads.base import Head, HeadSpec

DEPTHS = (1, 2, 3)
TOKENS = 40
"""Of each prompt's text, at most."""
LONGER = 5
"""Times as much text where another reading drafts better, but perhaps by chance: a wrong RoPE may cost a tenth only."""
DEAD_BELOW = 0.05
"""A head whose first token is accepted less often than this does not draft the text it is shown."""


def measure(model: str | None, head: str | None, progress: Progress) -> dict[str, Any]:
    """Acceptance by depth and position; `ran` is false, with `why`, where this model or head cannot run here. `better`:
    another reading of the weights that drafts better than what config.json says."""
    from headstart.config import EngineConfig
    from headstart.engine.load import load_model

    try:
        config = EngineConfig(head=head)
        loaded = load_model(model, config)
        if loaded.head is None:
            return {"ran": False, "why": "headstart finds no head in it that it can run"}
        return _measure(loaded, config, progress)
    except HeadstartError as error:
        return {"ran": False, "why": error.message}


def _measure(model: Model, config: EngineConfig, progress: Progress) -> dict[str, Any]:
    from headstart.api import LLM
    from headstart.tools.acceptance import on_builtin_prompts
    from headstart.tools.inspect.readings import gains, is_better, other_readings

    assert model.head
    drafter = LLM(model, replace(config, depth=1)).engine.drafting.drafter
    deepest = drafter.max_depth if drafter else 0
    depths = [deepest] if model.head.spec.block else [depth for depth in DEPTHS if depth <= deepest]
    others = list(other_readings(model.head.spec, model.config.num_layers, ours=_is_ours(Path(model.head.source))))
    texts = len(builtin_prompts())
    done, whole = count(1), [texts * (len(depths) + len(others))]

    def tried(head: Head, depth: int, what: str, tokens: int = TOKENS) -> DraftStats:
        llm = LLM(replace(model, head=head), replace(config, depth=depth))
        return on_builtin_prompts(llm, tokens, lambda: progress(next(done), whole[0], f"measuring acceptance {what}"))

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


def _read_as(model: Model, spec: HeadSpec) -> Head:
    """The head's own weights under another spec."""
    from headstart.engine.attach import fit_head
    from headstart.heads.files import read_head

    assert model.head
    path = Path(model.head.source)
    return fit_head(model, replace(read_head(path), spec=spec), path)


def _is_ours(head: Path) -> bool:
    """Is its config.json in headstart's own words?"""
    from headstart.heads.files import MARK

    config = head / "config.json"
    return config.is_file() and MARK in read_object(config)


def _rates(stats: DraftStats) -> list[float]:
    """Share of the drafts that reach a position whose token there was accepted."""
    return [hits / tries for hits, tries in zip(stats.per_position, stats.drafted_at, strict=True)]
