"""Spec-Bench: lines of JSON with `question_id`, `category` and `turns`. Standard library only."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import chain, zip_longest
from pathlib import Path

NUM_CATEGORIES = 13


def by_category(path: Path, per_category: int) -> dict[str, list[str]]:
    """First turns of the first questions of each category, in file order."""
    taken: dict[str, list[str]] = defaultdict(list)
    for line in path.read_text("utf-8").splitlines():
        record = json.loads(line)
        if len(taken[record["category"]]) < per_category:
            taken[record["category"]].append(record["turns"][0])
    return taken


def first_turns(path: Path, per_category: int) -> list[tuple[str, str]]:
    """(category, prompt), by category."""
    return [(category, text) for category, texts in by_category(path, per_category).items() for text in texts]


def in_turns(path: Path, per_category: int) -> list[str]:
    """Prompts of alternating categories."""
    return [text for text in chain(*zip_longest(*by_category(path, per_category).values())) if text is not None]
