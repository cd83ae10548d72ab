"""What a head is worth on this machine: predicted from its acceptance and the costs of passes, then measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import DraftStats, SamplingParams
from headstart.engine.calibrate import calibrate
from headstart.engine.costs import Work
from headstart.engine.engine import Engine
from headstart.train.data import Example
from headstart.train.progress import shown

PROMPTS, TOKENS, ROUNDS = 12, 48, 3
LONGEST_PROMPT = 512


@dataclass(frozen=True)
class Gain:
    """`ratio`: tokens/s with the head over without, median and quartiles over pairs. `costs`: milliseconds of a pass
    over one row, of one over depth + 1 rows, of a whole draft. `predicted`: acceptance length x t(1) / (t(depth + 1) +
    draft)."""

    depth: int
    acceptance_length: float
    ratio: tuple[float, float, float]
    tokens_per_s: tuple[float, float]  # without, with
    costs: tuple[float, float, float]

    @property
    def needed(self) -> float:
        """The acceptance length at which drafting costs what it saves."""
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
                f"{self.depth}. Train longer, on text like your traffic, or use a smaller --depth."
            )
        return lines


def measure(model: str, head: Path, examples: Sequence[Example], depth: int, threads: int | None) -> Gain | None:
    """Decode held-out prompts greedily, one at a time, without and with the head, alternating. None where no example
    has a prompt that fits."""
    prompts = [ids for ids in map(prompt_of, examples) if ids][:PROMPTS]
    if not prompts:
        return None
    config = EngineConfig(head=str(head), depth=depth, threads=threads, seed=0)
    llm = LLM(model, config)
    room = int(llm.info["context"])
    prompts = [ids for ids in prompts if len(ids) + TOKENS <= room]
    if not prompts:
        return None
    params, stats = SamplingParams(max_tokens=TOKENS, ignore_eos=True), DraftStats()
    rates: dict[bool, list[float]] = {False: [], True: []}
    llm.generate(prompts[:1], params)  # first calls pay for allocations
    with shown("measuring the gain") as show:
        for turn in range(ROUNDS):
            for index, ids in enumerate(prompts):
                pair = llm.decode_pair(ids, params, turn + index)
                for drafting, each in pair.items():
                    rates[drafting].append(each.timing["decode_tokens_per_s"])
                stats.add(pair[True].speculation)
                show((turn * len(prompts) + index + 1) / (ROUNDS * len(prompts)), f"round {turn + 1}")
    pairs = [on / off for off, on in zip(rates[False], rates[True], strict=True) if on and off]
    low, middle, high = quantiles(pairs, n=4) if len(pairs) > 1 else pairs * 3
    return Gain(
        depth=depth,
        acceptance_length=stats.acceptance_length,
        ratio=(low, middle, high),
        tokens_per_s=(median(rates[False]), median(rates[True])),
        costs=_costs(llm.engine, depth),
    )


def prompt_of(example: Example) -> list[int]:
    """Tokens before the first answer; none where the example is plain text or the prompt is long."""
    first = int(example.loss.argmax()) + 1
    return example.tokens[:first].tolist() if 2 <= first <= LONGEST_PROMPT else []


def _costs(engine: Engine, depth: int) -> tuple[float, float, float]:
    """Milliseconds of a pass over one row, of one over depth + 1 rows, of a draft, by the engine itself."""
    costs = calibrate(engine)
    seconds = (costs.of_pass(Work(1)), costs.of_pass(Work(depth + 1)), costs.of_draft([1] * depth, 0))
    return seconds[0] * 1e3, seconds[1] * 1e3, seconds[2] * 1e3
