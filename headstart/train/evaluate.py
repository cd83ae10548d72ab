"""Held-out acceptance: how often the head's greedy draft is the trunk's own greedy token, teacher-forced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headstart.heads.base import HeadSpec, Module
from headstart.train.batches import collate, plan_epoch
from headstart.train.data import Example
from headstart.train.features import FeatureCache
from headstart.train.objective import Target, Weighting, assess, cumulative

BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Acceptance:
    """`accepted[i]` of `tried` drafts had their first i + 1 tokens right."""

    accepted: tuple[int, ...]
    tried: int

    @property
    def cumulative(self) -> list[float]:
        return [count / max(self.tried, 1) for count in self.accepted]

    @property
    def length(self) -> float:
        """Acceptance length: 1 + mean number of right tokens."""
        return 1 + sum(self.cumulative)

    def data(self) -> dict[str, Any]:
        return {"cumulative": [round(x, 4) for x in self.cumulative], "length": round(self.length, 4)}

    def __add__(self, other: Acceptance) -> Acceptance:
        pairs = zip(self.accepted, other.accepted, strict=True)
        return Acceptance(tuple(a + b for a, b in pairs), self.tried + other.tried)


@torch.no_grad()
def evaluate(
    modules: Sequence[Module],
    spec: HeadSpec,
    target: Target,
    examples: Sequence[Example],
    cache: FeatureCache,
    weighting: Weighting,
) -> dict[str, Acceptance]:
    """Acceptance per kind of text, and of "all"."""
    results = {"all": Acceptance((0,) * len(weighting.steps), 0)}
    for numbers in plan_epoch([len(example) for example in examples], BATCH_TOKENS, 0, 0):
        batch = collate([examples[i] for i in numbers], cache, target.embedding.dtype, target.ids.device)
        accepted, tried = cumulative(assess(modules, spec, target, batch, weighting))
        for kind, hits, tries in zip(batch.kinds, accepted.tolist(), tried[:, 0].tolist(), strict=True):
            acceptance = Acceptance(tuple(hits), tries)
            results["all"] = results["all"] + acceptance
            results[kind] = results[kind] + acceptance if kind in results else acceptance
    return dict(sorted(results.items()))
