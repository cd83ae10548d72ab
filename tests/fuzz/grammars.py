"""Grammars, schemas, regexes and choices: small and vast, well formed and not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def requests(rng: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path, body), without end."""
    while True:
        yield TEXT, {"prompt": "x", "max_tokens": 8, "guided_regex": rng.choice(["[a-z]+", "(", "\\d{3}", "a|b"])}
