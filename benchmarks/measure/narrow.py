"""Three narrow workloads, as servers have them: calls of tools in JSON, one programming language, one style of chat.

Prompts are made here, from the lists of narrow.json; no measuring data is among them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
WORKLOADS = tuple(DATA["templates"])


def prompts(name: str, count: int, seed: int = 0) -> Iterator[list[dict[str, str]]]:
    """Conversations of a workload up to the answer, all different, the same for the same arguments."""
    rng, seen = random.Random(f"{name} {seed}"), set[str]()
    system = [{"role": "system", "content": DATA["systems"][name]}] if name in DATA["systems"] else []
    while len(seen) < count:
        text = re.sub(r"{(\w+)}", lambda match: _fill(match[1], rng), rng.choice(DATA["templates"][name])).strip()
        if text not in seen:
            seen.add(text)
            yield [*system, {"role": "user", "content": text}]


def _fill(word: str, rng: random.Random) -> str:
    return (
        str(rng.randrange(*DATA["numbers"][word])) if word in DATA["numbers"] else str(rng.choice(DATA["lists"][word]))
    )
