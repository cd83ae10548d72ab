"""Held-out acceptance: how often the head's greedy draft is the trunk's own greedy token, teacher-forced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headstart.heads.base import HeadSpec
from headstart.train.batches import collate, plan_epoch
from headstart.train.data import Example
from headstart.train.features import States
from headstart.train.objective import Target, Weighting, assess, cumulative

BATCH_TOKENS = 4096
ANCHORS = 0.2
"""Of the possible anchors of a block drafter: always the same ones."""


@dataclass(frozen=True)
class Acceptance:
    """`accepted[i]` of `tried` drafts had their first i + 1 tokens right; `expected[i]` is how many of those
    the best rule would accept at T = 1."""

    accepted: tuple[int, ...]
    tried: int
    expected: tuple[float, ...]

    @property
    def cumulative(self) -> list[float]:
        return [count / max(self.tried, 1) for count in self.accepted]

    @property
    def length(self) -> float:
        """Acceptance length: 1 + mean number of right tokens."""
        return 1 + sum(self.cumulative)

    def data(self) -> dict[str, Any]:
        sampled = 1 + sum(self.expected) / max(self.tried, 1)
        return {
            "cumulative": [round(x, 4) for x in self.cumulative],
            "length": round(self.length, 4),
            "sampled_length": round(sampled, 4),
        }

    def __add__(self, other: Acceptance) -> Acceptance:
        accepted = zip(self.accepted, other.accepted, strict=True)
        expected = zip(self.expected, other.expected, strict=True)
        return Acceptance(
            tuple(a + b for a, b in accepted), self.tried + other.tried, tuple(a + b for a, b in expected)
        )


@torch.no_grad()
def evaluate(
    modules: Sequence[Any],
    spec: HeadSpec,
    target: Target,
    examples: Sequence[Example],
    cache: States,
    weighting: Weighting,
) -> dict[str, Acceptance]:
    """Acceptance per kind of text, and of "all"."""
    depth, weighting = len(weighting.steps), replace(weighting, anchors=ANCHORS)
    results = {"all": Acceptance((0,) * depth, 0, (0.0,) * depth)}
    for numbers in plan_epoch([len(example) for example in examples], BATCH_TOKENS, 0, 0):
        batch = collate([examples[i] for i in numbers], cache, target.embedding.dtype, target.ids.device)
        found = cumulative(assess(modules, spec, target, batch, weighting), len(batch.kinds))
        for kind, hits, shared, tries in zip(batch.kinds, *(each.tolist() for each in found), strict=True):
            acceptance = Acceptance(tuple(hits), tries, tuple(shared))
            results["all"] = results["all"] + acceptance
            results[kind] = results[kind] + acceptance if kind in results else acceptance
    return dict(sorted(results.items()))
