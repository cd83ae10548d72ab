"""Two heads over the same requests: the texts are the same, so each request is a pair."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headstart.api import LLM
from headstart.config import FIXED_DEPTH, EngineConfig
from headstart.core import Float32, SamplingParams
from headstart.engine.attach import attach_head
from headstart.engine.load import Model
from headstart.server.records import Record
from headstart.tools.adapt.split import seed_of
from headstart.tools.bench.statistics import RESAMPLES, TAIL

PROMPT_TOKENS, TOKENS = 1024, 96
"""At most, of a request: the end of its prompt, and its text."""
TOGETHER = 16
FEWEST = 4
"""Requests of which an interval is made."""


@dataclass(frozen=True)
class Asked:
    """A prompt, and how its text is drawn."""

    ids: Seq[int]
    params: SamplingParams

    @classmethod
    def of(cls, record: Record) -> Asked:
        """As it was asked, up to as many tokens as it got."""
        length = min(max(len(record.response_ids), 8), TOKENS)
        params = SamplingParams(max_tokens=length, temperature=record.temperature, seed=seed_of(record))
        return cls(record.prompt_ids[-PROMPT_TOKENS:], params)


@dataclass
class Comparison:
    """[n, 2] of each request: drafts, and accepted tokens."""

    before: list[tuple[int, int]] = field(default_factory=list)
    after: list[tuple[int, int]] = field(default_factory=list)

    @property
    def lengths(self) -> tuple[float, float]:
        """Acceptance lengths."""
        return _length(np.array(self.before)).item(), _length(np.array(self.after)).item()

    @property
    def difference(self) -> tuple[float, float] | None:
        """95 % interval of after - before: percentile bootstrap over requests. None for too few."""
        if len(self.before) < FEWEST:
            return None
        count = len(self.before)
        drawn = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
        before, after = (_length(np.array(each)[drawn]) for each in (self.before, self.after))
        low, high = np.quantile(after - before, (TAIL, 1 - TAIL)).tolist()
        return low, high

    @property
    def is_better(self) -> bool:
        """Beyond its interval."""
        return self.difference is not None and self.difference[0] > 0

    def line(self, what: str) -> str:
        if not self.before:
            return f"{what}: nothing measured"
        (before, after), interval = self.lengths, self.difference
        shown = f" ({interval[0]:+.2f} to {interval[1]:+.2f})" if interval else ""
        return f"{what}: acceptance length {before:.2f} -> {after:.2f}{shown}, {len(self.before)} requests"

    def data(self) -> dict[str, Any]:
        if not self.before:
            return {"requests": 0}
        (before, after), interval = self.lengths, self.difference
        names = {"requests": len(self.before), "before": round(before, 4), "after": round(after, 4)}
        return {**names, "difference": interval and [round(each, 4) for each in interval]}


def _length(counts: Float32) -> Float32:
    """[..., n, 2] -> [...]."""
    total = counts.sum(-2)
    lengths: Float32 = 1 + total[..., 1] / np.maximum(total[..., 0], 1)
    return lengths


class Pair:
    """The model with one head and with the other: `None` is the head that it has."""

    def __init__(self, model: Model, config: EngineConfig, before: str | None, after: str) -> None:
        heads = [model.head if path is None else attach_head(model, Path(path)) for path in (before, after)]
        self._llms = [_llm(replace(model, head=head), config) for head in heads]

    def compare(self, asked: Seq[Asked], done: Callable[[int], bool] = lambda count: True) -> Comparison:
        """A few at a time, for as long as `done` (told how many there are) says True."""
        found = Comparison()
        for start in range(0, len(asked), TOGETHER):
            part = asked[start : start + TOGETHER]
            pair = [_counts(llm, part) for llm in self._llms]
            both = [each for each in zip(*pair, strict=True) if all(drafts for drafts, _ in each)]
            found.before += [before for before, _ in both]
            found.after += [after for _, after in both]
            if not done(start + len(part)):
                break
        return found

    def encode(self, prompt: str) -> list[int]:
        return self._llms[0].encode(prompt)


def _llm(model: Model, config: EngineConfig) -> LLM:
    """Drafting at one depth: a whole block where that is one pass."""
    assert model.head is not None
    llm = LLM(model, replace(config, drafter=model.head.spec.kind, depth=1, max_num_seqs=TOGETHER))
    drafter = llm.engine.drafting.drafter
    assert drafter is not None
    whole = drafter.max_depth if drafter.costs_per == "pass" else FIXED_DEPTH
    llm.engine.drafting.depth = min(whole, drafter.max_depth)
    return llm


def _counts(llm: LLM, asked: Seq[Asked]) -> list[tuple[int, int]]:
    """Drafts and accepted tokens of each; (0, 0) where it does not fit."""
    fits = [each for each in asked if len(each.ids) + 1 < llm.engine.max_length]
    completions = llm.generate([each.ids for each in fits], [each.params for each in fits])
    stats = {id(each): completion.speculation for each, completion in zip(fits, completions, strict=True)}
    return [(found.drafts, found.accepted) if (found := stats.get(id(each))) else (0, 0) for each in asked]
