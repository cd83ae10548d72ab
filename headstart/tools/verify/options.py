"""What `headstart verify` compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headstart import hub
from headstart.config import AUTO, Depth, EngineConfig
from headstart.errors import UsageError

Prompt = str | list[int]
MOST_SEED = 2**43
"""A prompt's own seed is about a million times that of its cell, and fits into 64 bits."""
DEPTHS: tuple[Depth, ...] = (0, 1, 3, 5, AUTO)
FULL_DEPTHS: tuple[Depth, ...] = (0, 1, 2, 3, 4, 5, AUTO)
FULL: Mapping[str, Any] = {
    "temperatures": (0.0, 0.7, 1.0, 1.5),
    "depths": FULL_DEPTHS,
    "batch_sizes": (1, 4, 16),
    "chunk_sizes": (1, 37, 512),
    "min_texts": 2000,
}
"""The fields of VerifyOptions that make the big grid."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """What to compare. Every pair of levels of two factors is covered by at least one cell."""

    model: str | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    prompts: tuple[Prompt, ...] | None = None
    raw: bool = False
    max_tokens: int = 64
    min_texts: int = 0  # cells are added until so many (cell, prompt) pairs are compared
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    depths: tuple[Depth, ...] = DEPTHS  # what nobody asked for is as deep as each drafter goes
    drafters: tuple[str, ...] = ()  # empty: see default_drafters
    batch_sizes: tuple[int, ...] = (1, 8)
    chunk_sizes: tuple[int, ...] = (32, 512)
    prefix_caching: tuple[bool, ...] = (True, False)
    preemption: tuple[bool, ...] = (True, False)  # True: so few blocks that running sequences lose theirs
    thread_counts: tuple[int, ...] = ()  # empty: see default_threads
    seeds: tuple[int, ...] = (0,)
    against: str | None = None

    def __post_init__(self) -> None:
        if wrong := [seed for seed in self.seeds if not 0 <= seed <= MOST_SEED]:
            raise UsageError(f"--seeds has {wrong[0]}, but a seed is between 0 and {MOST_SEED}")

    def factors(self) -> dict[str, tuple[Any, ...]]:
        return {
            "temperature": self.temperatures,
            "depth": self.depths,
            "drafter": self.drafters or default_drafters(self),
            "batch": self.batch_sizes,
            "chunk": self.chunk_sizes,
            "cache": self.prefix_caching,
            "preemption": self.preemption,
            "threads": self.thread_counts,
            "seed": self.seeds,
        }


def default_drafters(options: VerifyOptions, head: str | None = "mtp") -> tuple[str, ...]:
    """The head, by its kind, lookup, both, and the other heads that are shipped with the model. `head` None: it has
    none."""
    if head is None:
        return ("ngram",)
    shipped = hub.shipped_heads(options.model or hub.DEFAULT_MODEL) if options.config.head is None else {}
    return (head, "ngram", "mixed", *(kind for kind in shipped if kind != head))
