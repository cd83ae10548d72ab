"""Acceptance measured, not read: greedy texts of the built-in prompts, drafted with the head at depth 1, 2 and 3.

The trunk decides every token, so each draft is judged after a true context: the acceptance is teacher-forced.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from headstart.core import Progress
from headstart.errors import HeadstartError
from headstart.stats import DraftStats
from headstart.tools.prompts import builtin_prompts

if TYPE_CHECKING:
    from headstart.engine.load import Model

DEPTHS = (1, 2, 3)
TOKENS = 40
"""Of each prompt's text, at most."""
DEAD_BELOW = 0.05
"""A head whose first token is accepted less often than this does not draft the text it is shown."""


def measure(model: str | None, head: str | None, progress: Progress) -> dict[str, Any]:
    """Acceptance by depth and position; `ran` is false, with `why`, where this model or head cannot run here."""
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


def _measure(model: Model, config: Any, progress: Progress) -> dict[str, Any]:
    from headstart.api import LLM
    from headstart.tools.acceptance import on_builtin_prompts

    drafter = LLM(model, replace(config, depth=1)).engine.drafting.drafter
    deepest = min(len(DEPTHS), drafter.max_depth if drafter else 0)
    rows: list[dict[str, Any]] = []
    tokens, done = 0, count(1)
    for depth in DEPTHS[:deepest]:
        llm = LLM(model, replace(config, depth=depth))

        def finished(depth: int = depth) -> None:
            progress(next(done), len(builtin_prompts()) * deepest, f"measuring acceptance at depth {depth}")

        stats = on_builtin_prompts(llm, TOKENS, finished)
        tokens += stats.emitted
        rows.append({"depth": depth, "acceptance_length": stats.acceptance_length, "per_position": _rates(stats)})
    first = rows[0]["per_position"][0] if rows and rows[0]["per_position"] else 0.0
    return {
        "ran": True,
        "method": model.head.spec.kind if model.head else "none",
        "tokens": tokens,
        "acceptance": first,
        "dead": first < DEAD_BELOW,
        "depths": rows,
    }


def _rates(stats: DraftStats) -> list[float]:
    """Share of the drafts that reach a position whose token there was accepted."""
    return [hits / tries for hits, tries in zip(stats.per_position, stats.drafted_at, strict=True)]
