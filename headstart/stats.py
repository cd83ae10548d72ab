"""Counts of what drafting did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


def synthetic_note(rates: Iterable[float]) -> str:
    """For people, wherever rates decided and not the model."""
    shown = ", ".join(f"{rate:g}" for rate in rates)
    return f"SYNTHETIC ACCEPTANCE at {shown}: for load tests, the text is not the model's"


@dataclass
class DraftStats:
    """Counts of drafting, in vLLM's terms. `per_position[i]` = drafts whose token i was accepted;
    `drafted_at[i]` = drafts that had a token i. Forced drafts are `forced` only: they say nothing of a drafter."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    passes: int = 0  # passes that gave at least one token
    emitted: int = 0
    forced: int = 0  # emitted tokens that a constraint had left no choice about, and that were drafted for it
    per_position: list[int] = field(default_factory=list)
    drafted_at: list[int] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)  # accepted tokens by who drafted them
    synthetic: tuple[float, ...] = ()  # rates of synthetic acceptance, where they decided and not the model

    def record(self, drafted: int, accepted: int, source: str = "") -> None:
        if drafted:
            self.sources[source] += accepted
            self.drafts += 1
            self.drafted += drafted
            self.accepted += accepted
            grow = drafted - len(self.per_position)
            self.per_position += [0] * grow
            self.drafted_at += [0] * grow
            for i in range(drafted):
                self.drafted_at[i] += 1
                self.per_position[i] += i < accepted

    def add(self, other: DraftStats) -> None:
        for name in ("drafts", "drafted", "accepted", "passes", "emitted", "forced"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.sources.update(other.sources)
        self.synthetic = self.synthetic or other.synthetic
        grow = len(other.per_position) - len(self.per_position)
        self.per_position += [0] * grow
        self.drafted_at += [0] * grow
        for i, (hits, tries) in enumerate(zip(other.per_position, other.drafted_at, strict=False)):
            self.per_position[i] += hits
            self.drafted_at[i] += tries

    def document(self, method: str) -> dict[str, Any]:
        """As every JSON output has it; `per_position` counts accepted drafts by position."""
        return {
            **({"synthetic_acceptance": list(self.synthetic)} if self.synthetic else {}),
            "method": method,
            "drafts": self.drafts,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance_rate": self.acceptance_rate,
            "acceptance_length": self.acceptance_length,
            "per_position": list(self.per_position),
            "forced": self.forced,
            "sources": dict(self.sources),
        }

    @property
    def acceptance_rate(self) -> float:
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.drafts if self.drafts else 1.0
