"""`headstart demo`: decodes the same prompts with drafting off and on, and compares text, passes and speed."""

import time
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from headstart.api import LLM, Completion
from headstart.config import EngineConfig
from headstart.core import DraftStats, Progress, Report, SamplingParams, no_progress
from headstart.tools.options import DemoFlags
from headstart.tools.prompts import builtin_prompts, first_difference

MAX_ROUNDS = 3
TIME_BUDGET_S = 90.0  # a round only begins if it is expected to end within this time
MIN_TOKENS, MAX_TOKENS = 16, 64
WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class DemoOptions(DemoFlags):
    config: EngineConfig = field(default_factory=EngineConfig)


@dataclass
class PromptRuns:
    """The completions of one prompt."""

    kind: str  # of the prompt, such as code
    runs: dict[bool, list[Completion]] = field(default_factory=lambda: {False: [], True: []})  # key: is it drafting?

    def seconds(self, drafting: bool) -> float:
        return median(run.timing["decode_s"] for run in self.runs[drafting])

    def difference(self) -> int | None:
        """Returns the first token index at which any run differs from the first plain run; None if all are equal."""
        plain, *others = (list(run.token_ids) for run in self.runs[False] + self.runs[True])
        places = (first_difference(plain, other) for other in others)
        return min((place for place in places if place is not None), default=None)

    def row(self) -> dict[str, Any]:
        difference, tokens = self.difference(), len(self.runs[True][0].token_ids)
        off, on = (self.runs[drafting][0].speculation for drafting in (False, True))
        return {
            "kind": self.kind, "identical": difference is None, "first_difference": difference, "tokens": tokens,
            "passes_off": off.passes, "passes_on": on.passes, "passes_per_token": on.passes / max(tokens, 1),
            "acceptance_length": on.acceptance_length,
            **_speeds(max(tokens - 1, 0), self.seconds(False), self.seconds(True)),
        }  # fmt: skip


def _speeds(tokens: int, seconds_off: float, seconds_on: float) -> dict[str, float]:
    """Returns tokens/s and their ratio. `tokens` excludes the first token of each prompt, which prefill computes."""
    off, on = (tokens / seconds if seconds > 0 else 0.0 for seconds in (seconds_off, seconds_on))
    return {"tokens_per_s_off": off, "tokens_per_s_on": on, "speed_ratio": on / off if off else 0.0}


def run(options: DemoOptions, progress: Progress = no_progress) -> Report:
    """Decodes prompts greedily with drafting off and on, in turns, as time allows. `ok`: all tokens are the same."""
    llm = LLM(options.model, options.config)
    prompts = builtin_prompts()
    measured = [PromptRuns(kind) for kind, _ in prompts]
    warm_up = SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True)  # first calls pay for allocations
    speeds = [llm.generate([prompt], warm_up, depth=0)[0].timing["decode_tokens_per_s"] for _, prompt in prompts[:2]]
    affordable = int(TIME_BUDGET_S / 2 * speeds[-1] / (2 * len(prompts)))  # tokens, if a round takes half of the time
    params = SamplingParams(max_tokens=options.max_tokens or max(MIN_TOKENS, min(MAX_TOKENS, affordable)))
    begin = time.monotonic()
    rounds = 0
    while rounds < MAX_ROUNDS and (time.monotonic() - begin) * (rounds + 1) <= TIME_BUDGET_S * max(rounds, 1):
        for index, (kind, prompt) in enumerate(prompts):
            progress(rounds * len(prompts) + index, MAX_ROUNDS * len(prompts), f"round {rounds + 1}: {kind}")
            for drafting, each in llm.decode_pair(prompt, params, index + rounds).items():
                measured[index].runs[drafting].append(each)
        rounds += 1
    return _report(measured, options, rounds, llm.model.name)


def _report(measured: list[PromptRuns], options: DemoOptions, rounds: int, model: str) -> Report:
    rows = [item.row() for item in measured]
    stats = DraftStats()
    for item in measured:
        stats.add(item.runs[True][0].speculation)
    off, on = (sum(item.seconds(drafting) for item in measured) for drafting in (False, True))
    names = ("identical", "tokens", "passes_off", "passes_on")
    identical, tokens, passes_off, passes_on = (sum(row[name] for row in rows) for name in names)
    data: dict[str, Any] = {
        "model": model, "method": measured[0].runs[True][0].method, "depth": options.config.depth, "rounds": rounds,
        "identical": identical, "total": len(rows), "tokens": tokens, "passes_off": passes_off, "passes_on": passes_on,
        "passes_per_token": passes_on / max(tokens, 1), "passes_saved": 1 - passes_on / max(passes_off, 1),
        "acceptance_length": stats.acceptance_length,
        **_speeds(sum(max(row["tokens"] - 1, 0) for row in rows), off, on), "prompts": rows,
    }  # fmt: skip
    return Report(ok=identical == len(rows), data=data, lines=lines_of(data))


def lines_of(data: dict[str, Any]) -> list[str]:
    return [
        f"identical {data['identical']}/{data['total']}",
        f"passes    {data['passes_off']} -> {data['passes_on']} for {data['tokens']} tokens "
        f"({data['passes_per_token']:.2f} per token, {data['passes_saved']:.0%} saved)",
        f"accepted  {data['acceptance_length']:.2f} acceptance length ({data['method']}, depth {data['depth']})",
        f"speed     {data['tokens_per_s_off']:.1f} -> {data['tokens_per_s_on']:.1f} tokens/s "
        f"({data['speed_ratio']:.2f}x, median of {data['rounds']} round{'s' if data['rounds'] != 1 else ''})",
    ]
