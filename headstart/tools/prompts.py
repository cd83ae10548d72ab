"""The prompts that come with headstart: a handful of kinds, written for it."""

from __future__ import annotations

import json
from importlib import resources


def builtin_prompts() -> tuple[tuple[str, str], ...]:
    """(kind, prompt) pairs."""
    text = resources.files("headstart.tools").joinpath("demo_prompts.json").read_text("utf-8")
    return tuple((item["kind"], item["prompt"]) for item in json.loads(text))
