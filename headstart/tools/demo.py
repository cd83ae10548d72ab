"""`headstart demo`: the same prompts with drafting off and on; is the text the same, and what does it save?"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from headstart.api import LLM, Completion
from headstart.config import EngineConfig
from headstart.core import DraftStats, Progress, Report, SamplingParams, no_progress
from headstart.tools.prompts import builtin_prompts

MAX_ROUNDS = 3
TIME_BUDGET_S = 90.0
"""No new round of measuring begins when it would probably end after this."""
FEWEST_TOKENS, MOST_TOKENS = 16, 64
WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """What to decode and how."""

    model: str | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    max_tokens: int | None = None  # None: as many as the machine decodes in the time budget, at most MOST_TOKENS


@dataclass
class Measured:
    """All runs of one prompt, by whether drafting was on."""

    kind: str
    runs: dict[bool, list[Completion]] = field(default_factory=lambda: {False: [], True: []})

    def seconds(self, drafting: bool) -> float:
        return median(run.timing["decode_s"] for run in self.runs[drafting])

    def row(self) -> dict[str, Any]:
        off, on = self.runs[False][0], self.runs[True][0]
        difference = first_difference(self.runs)
        tokens = len(on.token_ids)
        speed = {drafting: tokens_per_second(tokens, self.seconds(drafting)) for drafting in (False, True)}
        return {
            "kind": self.kind,
            "identical": difference is None,
            "first_difference": difference,
            "tokens": tokens,
            "passes_off": off.speculation.passes,
            "passes_on": on.speculation.passes,
            "passes_per_token": on.speculation.passes / max(tokens, 1),
            "acceptance_length": on.speculation.acceptance_length,
            "tokens_per_s_off": speed[False],
            "tokens_per_s_on": speed[True],
            "speed_ratio": speed[True] / speed[False] if speed[False] else 0.0,
        }


def run(options: DemoOptions, progress: Progress = no_progress) -> Report:
    """Decode every prompt greedily with drafting off and on, in alternating order, as often as the time allows;
    `ok` is false if any two runs of a prompt differ in a token."""
    llm = LLM(options.model, options.config)
    prompts = builtin_prompts()
    measured = [Measured(kind) for kind, _ in prompts]
    warm_up = SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True)  # first calls pay for allocations
    speeds = [llm.generate([prompt], warm_up, depth=0)[0].timing["decode_tokens_per_s"] for _, prompt in prompts[:2]]
    params = SamplingParams(max_tokens=options.max_tokens or affordable_tokens(speeds[-1], len(prompts)))
    begin = time.monotonic()
    rounds = 0
    while rounds < MAX_ROUNDS and (time.monotonic() - begin) * (rounds + 1) <= TIME_BUDGET_S * max(rounds, 1):
        for index, (kind, prompt) in enumerate(prompts):
            progress(rounds * len(prompts) + index, MAX_ROUNDS * len(prompts), f"round {rounds + 1}: {kind}")
            for drafting, each in llm.decode_pair(prompt, params, index + rounds).items():
                measured[index].runs[drafting].append(each)
        rounds += 1
    return _report(measured, options, rounds, llm.model.name)


def affordable_tokens(tokens_per_s: float, num_prompts: int) -> int:
    """Tokens per prompt that one round, off and on, decodes in about half of the time budget."""
    return max(FEWEST_TOKENS, min(MOST_TOKENS, int(TIME_BUDGET_S / 2 * tokens_per_s / (2 * num_prompts))))


def first_difference(runs: dict[bool, list[Completion]]) -> int | None:
    """The first token index at which any run differs from the first plain one; None if there is none."""
    plain = list(runs[False][0].token_ids)
    places = []
    for other in (list(run.token_ids) for run in runs[False] + runs[True]):
        if other != plain:
            same = zip(plain, other, strict=False)
            places.append(next((i for i, (a, b) in enumerate(same) if a != b), min(len(plain), len(other))))
    return min(places, default=None)


def tokens_per_second(tokens: int, seconds: float) -> float:
    """Decoding speed; the first token belongs to the prompt's pass and is not counted."""
    return (tokens - 1) / seconds if tokens > 1 and seconds > 0 else 0.0


def _report(measured: list[Measured], options: DemoOptions, rounds: int, model: str) -> Report:
    rows = [item.row() for item in measured]
    stats = DraftStats()
    for item in measured:
        stats.add(item.runs[True][0].speculation)
    seconds = {drafting: sum(item.seconds(drafting) for item in measured) for drafting in (False, True)}
    passes = {name: sum(row[name] for row in rows) for name in ("passes_off", "passes_on")}
    tokens = sum(row["tokens"] for row in rows)
    counted = sum(max(row["tokens"] - 1, 0) for row in rows)
    speed = {drafting: counted / seconds[drafting] if seconds[drafting] else 0.0 for drafting in seconds}
    data: dict[str, Any] = {
        "model": model,
        "method": measured[0].runs[True][0].method,
        "depth": options.config.depth,
        "rounds": rounds,
        "identical": sum(row["identical"] for row in rows),
        "total": len(rows),
        "tokens": tokens,
        **passes,
        "passes_per_token": passes["passes_on"] / max(tokens, 1),
        "passes_saved": 1 - passes["passes_on"] / max(passes["passes_off"], 1),
        "acceptance_length": stats.acceptance_length,
        "tokens_per_s_off": speed[False],
        "tokens_per_s_on": speed[True],
        "speed_ratio": speed[True] / speed[False] if speed[False] else 0.0,
        "prompts": rows,
    }
    return Report(ok=data["identical"] == data["total"], data=data, lines=lines_of(data))


def lines_of(data: dict[str, Any]) -> list[str]:
    """The summary for people."""
    return [
        f"identical {data['identical']}/{data['total']}",
        f"passes    {data['passes_off']} -> {data['passes_on']} for {data['tokens']} tokens "
        f"({data['passes_per_token']:.2f} per token, {data['passes_saved']:.0%} saved)",
        f"accepted  {data['acceptance_length']:.2f} acceptance length ({data['method']}, depth {data['depth']})",
        f"speed     {data['tokens_per_s_off']:.1f} -> {data['tokens_per_s_on']:.1f} tokens/s "
        f"({data['speed_ratio']:.2f}x, median of {data['rounds']} round{'s' if data['rounds'] != 1 else ''})",
    ]
