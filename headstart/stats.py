"""Statistics of drafting."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any


def synthetic_note(rates: Iterable[float]) -> str:
    """The warning wherever synthetic acceptance rates were used."""
    shown = ", ".join(f"{rate:g}" for rate in rates)
    return f"SYNTHETIC ACCEPTANCE at {shown}: for load tests, the text is not the model's"


def sum_positions(counts: Iterable[Iterable[int]]) -> list[int]:
    """Sums of lists of counts, position by position. The lists may have different lengths."""
    return list(map(sum, zip_longest(*counts, fillvalue=0)))


def acceptance_length(drafts: float, accepted: float) -> float:
    """1 + accepted tokens per draft, with the recovered or bonus token; 1.0 without drafts."""
    return 1 + accepted / drafts if drafts else 1.0


def equal_acceptance(length: float, depth: int) -> float:
    """The conditional acceptance, equal at all positions, that gives an acceptance length at a depth; from 0 to 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        is_below = sum(middle**position for position in range(depth + 1)) < length
        low, high = (middle, high) if is_below else (low, middle)
    return high


@dataclass
class DraftStats:
    """Counts of drafting, in vLLM's terms. Drafts forced by a constraint count as `forced` only."""

    drafts: int = 0
    drafted: int = 0  # tokens
    accepted: int = 0  # tokens
    passes: int = 0  # that emitted at least one token
    emitted: int = 0  # tokens
    forced: int = 0  # emitted tokens that were drafted because a constraint allowed no other
    per_position: list[int] = field(default_factory=list)  # [i]: drafts whose token i was accepted
    drafted_at: list[int] = field(default_factory=list)  # [i]: drafts with a token i
    sources: dict[str, int] = field(default_factory=dict)  # accepted tokens by drafter
    synthetic: tuple[float, ...] = ()  # acceptance rates of --synthetic-acceptance, if it was used

    def record(self, drafted: int, accepted: int, source: str = "", *, num_leaves: int = 0) -> None:
        """Count one draft: `drafted` tokens in a row, of which the first `accepted` were accepted. The last of these
        may be a leaf."""
        if drafted:
            self.sources[source] = self.sources.get(source, 0) + accepted
            self.drafts += 1
            self.drafted += drafted + num_leaves
            self.accepted += accepted
            grow = drafted - len(self.per_position)
            self.per_position += [0] * grow
            self.drafted_at += [0] * grow
            for i in range(drafted):
                self.drafted_at[i] += 1
                self.per_position[i] += i < accepted

    def add(self, other: "DraftStats") -> None:
        """Add the counts of another text."""
        for name in ("drafts", "drafted", "accepted", "passes", "emitted", "forced"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for source, accepted in other.sources.items():
            self.sources[source] = self.sources.get(source, 0) + accepted
        self.synthetic = self.synthetic or other.synthetic
        for name in ("per_position", "drafted_at"):
            setattr(self, name, sum_positions((getattr(self, name), getattr(other, name))))

    def document(self, method: str) -> dict[str, Any]:
        """The `speculation` object of JSON outputs."""
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
        """Accepted / drafted tokens."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_length(self) -> float:
        """`stats.acceptance_length` of these counts."""
        return acceptance_length(self.drafts, self.accepted)
