"""What a head must get right to pay here, measured once before the first request."""

from __future__ import annotations

import time

from headstart.api import LLM
from headstart.config import AUTO
from headstart.core import SamplingParams
from headstart.tools.prompts import builtin_prompts

MOST_SECONDS = 5.0
TOKENS = 32
ROUNDS = 3


def needed_acceptance(llm: LLM) -> float | None:
    """The acceptance length at which drafting for one sequence costs what it saves: seconds of a step with drafts over
    seconds of one without. Batches need more. None without drafter, with depth auto, or where the
    machine is too slow to try."""
    engine = llm.engine
    if engine.drafter is None or engine.depth in (0, AUTO):
        return None
    room = engine.max_length // 2
    prompt = llm.encode(builtin_prompts()[0][1])[:room]
    params = SamplingParams(max_tokens=min(TOKENS, room), ignore_eos=True)
    begun, rates = time.perf_counter(), list[float]()
    for _ in range(ROUNDS):
        seconds = [_seconds_per_pass(llm, prompt, params, depth) for depth in (0, None)]
        rates.append(seconds[1] / seconds[0])
        if time.perf_counter() - begun > MOST_SECONDS:
            break
    engine.reset_stats()
    return sorted(rates)[len(rates) // 2] if len(rates) > 1 else None  # the first round pays for first calls


def _seconds_per_pass(llm: LLM, prompt: list[int], params: SamplingParams, depth: int | None) -> float:
    engine = llm.engine
    passes, seconds = engine.stats.passes, sum(engine.seconds.values())
    llm.generate([prompt], params, depth=depth)
    return (sum(engine.seconds.values()) - seconds) / max(engine.stats.passes - passes, 1)
