"""Evaluates a head: held-out acceptance against the trunk's greedy tokens, and the measured speed-up."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any

import torch

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import DraftStats, Progress, SamplingParams
from headstart.engine.calibrate import calibrate
from headstart.engine.costs import PassShape
from headstart.engine.engine import Engine
from headstart.heads.base import HeadSpec
from headstart.train.dataset import collate, plan_epoch
from headstart.train.hidden_states import FeatureSource
from headstart.train.objective import DistillationTarget, LossConfig, count_accepted, score_batch
from headstart.train.records import Example

BATCH_TOKENS = 4096
ANCHORS = 0.2  # share of a block drafter's possible anchors that are evaluated; always the same ones
PROMPTS, TOKENS, ROUNDS = 12, 48, 3
MAX_PROMPT_TOKENS = 512


@dataclass(frozen=True)
class Acceptance:
    """Counts of held-out drafts, teacher-forced."""

    accepted: tuple[int, ...]  # [i]: drafts whose first i + 1 tokens are the trunk's greedy tokens
    tried: int  # drafts
    expected: tuple[float, ...]  # [i]: expected number of drafts whose first i + 1 tokens are accepted at T = 1

    @property
    def cumulative(self) -> list[float]:
        return [count / max(self.tried, 1) for count in self.accepted]

    @property
    def length(self) -> float:
        """Acceptance length: 1 + mean number of accepted tokens."""
        return 1 + sum(self.cumulative)

    def data(self) -> dict[str, Any]:
        sampled = 1 + sum(self.expected) / max(self.tried, 1)
        return {
            "cumulative": [round(x, 4) for x in self.cumulative],
            "length": round(self.length, 4),
            "sampled_length": round(sampled, 4),
        }

    def __add__(self, other: "Acceptance") -> "Acceptance":
        accepted = zip(self.accepted, other.accepted, strict=True)
        expected = zip(self.expected, other.expected, strict=True)
        return Acceptance(
            tuple(a + b for a, b in accepted), self.tried + other.tried, tuple(a + b for a, b in expected)
        )


@torch.no_grad()
def evaluate(
    modules: Sequence[Any], spec: HeadSpec, target: DistillationTarget, examples: Sequence[Example],
    features: FeatureSource, config: LossConfig,
) -> dict[str, Acceptance]:  # fmt: skip
    """Kind of text, or "all" -> acceptance over the held-out examples."""
    depth, config = len(config.steps), replace(config, anchors=ANCHORS)
    results = {"all": Acceptance((0,) * depth, 0, (0.0,) * depth)}
    for numbers in plan_epoch([len(example) for example in examples], BATCH_TOKENS, 0, 0):
        batch = collate([examples[i] for i in numbers], features, target.embedding.dtype, target.ids.device)
        counts = count_accepted(score_batch(modules, spec, target, batch, config), len(batch.kinds))
        for kind, hits, shared, tries in zip(batch.kinds, *(each.tolist() for each in counts), strict=True):
            acceptance = Acceptance(tuple(hits), tries, tuple(shared))
            results["all"] = results["all"] + acceptance
            results[kind] = results[kind] + acceptance if kind in results else acceptance
    return dict(sorted(results.items()))


@dataclass(frozen=True)
class MeasuredSpeedup:
    """Decoding with the head against decoding without, on this machine."""

    depth: int
    acceptance_length: float
    ratio: tuple[float, float, float]  # tokens/s with over without: lower quartile, median, upper quartile of pairs
    tokens_per_s: tuple[float, float]  # without, with
    costs: tuple[float, float, float]  # ms of a pass over one row, of one over depth + 1 rows, of a whole draft

    @property
    def needed(self) -> float:
        """The acceptance length at which drafting takes as long as plain decoding: (t(depth + 1) + draft) / t(1)."""
        one, rows, draft = self.costs
        return (rows + draft) / one

    @property
    def predicted(self) -> float:
        return self.acceptance_length / self.needed

    @property
    def pays(self) -> bool:
        return self.ratio[1] > 1

    def data(self) -> dict[str, Any]:
        return {
            "depth": self.depth,
            "acceptance_length": self.acceptance_length,
            "needed_acceptance_length": self.needed,
            "predicted_speedup": self.predicted,
            "measured_speedup": {"q1": self.ratio[0], "median": self.ratio[1], "q3": self.ratio[2]},
            "tokens_per_s": {"plain": self.tokens_per_s[0], "drafting": self.tokens_per_s[1]},
            "costs_ms": dict(zip(("one_row", "verify", "draft"), self.costs, strict=True)),
            "pays": self.pays,
        }

    def lines(self) -> list[str]:
        low, middle, high = self.ratio
        plain, drafting = self.tokens_per_s
        lines = [
            f"on this machine, depth {self.depth}, held-out prompts: acceptance length {self.acceptance_length:.2f}, "
            f"{plain:.0f} -> {drafting:.0f} tokens/s: {middle:.2f}x ({low:.2f} to {high:.2f}); predicted "
            f"{self.predicted:.2f}x"
        ]
        if not self.pays:
            lines.append(
                f"THIS HEAD DOES NOT PAY here: it needs an acceptance length of {self.needed:.2f} at depth "
                f"{self.depth}. Train on more text like your traffic, or use a smaller --depth."
            )
        return lines


def measure_speedup(
    model: str, config: EngineConfig, examples: Sequence[Example], progress: Progress
) -> MeasuredSpeedup | None:
    """Decode held-out prompts greedily with and without drafts, in turn; None where no prompt fits. config: with a
    fixed depth."""
    prompts = [ids for ids in map(prompt_of, examples) if ids][:PROMPTS]
    if not prompts:
        return None
    llm, depth = LLM(model, config), int(config.depth)
    prompts = [ids for ids in prompts if len(ids) + TOKENS <= int(llm.info["context"])]
    if not prompts:
        return None
    params, stats = SamplingParams(max_tokens=TOKENS, ignore_eos=True), DraftStats()
    rates: dict[bool, list[float]] = {False: [], True: []}
    llm.generate(prompts[:1], params)  # the first call pays for allocations
    for turn in range(ROUNDS):
        for index, ids in enumerate(prompts):
            pair = llm.decode_pair(ids, params, turn + index)
            for drafting, each in pair.items():
                rates[drafting].append(each.timing["decode_tokens_per_s"])
            stats.add(pair[True].speculation)
            progress(turn * len(prompts) + index + 1, ROUNDS * len(prompts), "measuring the gain")
    pairs = [on / off for off, on in zip(rates[False], rates[True], strict=True) if on and off]
    low, middle, high = quantiles(pairs, n=4) if len(pairs) > 1 else pairs * 3
    return MeasuredSpeedup(
        depth=depth, acceptance_length=stats.acceptance_length, ratio=(low, middle, high),
        tokens_per_s=(median(rates[False]), median(rates[True])), costs=_costs_ms(llm.engine, depth),
    )  # fmt: skip


def prompt_of(example: Example) -> list[int]:
    """Tokens before the first answer; empty for plain text and for long prompts."""
    first = int(example.loss.argmax()) + 1
    return example.tokens[:first].tolist() if 2 <= first <= MAX_PROMPT_TOKENS else []


def _costs_ms(engine: Engine, depth: int) -> tuple[float, float, float]:
    """Milliseconds of a pass over one row, of one over depth + 1 rows, of a draft, by the engine's calibration."""
    costs = calibrate(engine)
    seconds = (
        costs.pass_seconds(PassShape(1)),
        costs.pass_seconds(PassShape(depth + 1)),
        costs.draft_seconds([1] * depth, 0),
    )
    return seconds[0] * 1e3, seconds[1] * 1e3, seconds[2] * 1e3
