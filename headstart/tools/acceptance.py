"""How a head does on the prompts that come with headstart."""

from __future__ import annotations

from collections.abc import Callable

from headstart.api import LLM
from headstart.core import SamplingParams
from headstart.stats import DraftStats
from headstart.tools.prompts import builtin_prompts


def on_builtin_prompts(llm: LLM, max_tokens: int, finished: Callable[[], None]) -> DraftStats:
    """Counts of greedy texts of at most `max_tokens`, at the depth of the engine; `finished` is called after each."""
    stats = DraftStats()
    prompts = [prompt for _, prompt in builtin_prompts()]
    params = SamplingParams(max_tokens=max_tokens)
    for completion in llm.generate(prompts, params, on_finish=lambda index, completion: finished()):
        stats.add(completion.speculation)
    return stats
