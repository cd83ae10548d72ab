"""What headstart writes, and what it drafts behind given tokens."""

from __future__ import annotations

from headstart.api import LLM
from headstart.core import DraftStats, Request, SamplingParams, Sequence, Span
from headstart.drafters.base import Wish


def in_headstart(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[DraftStats, list[list[int]]]:
    """Counts of drafting and the texts' tokens, greedy, one prompt after another."""
    stats, texts = DraftStats(), []
    for ids in prompts:
        (each,) = llm.generate([ids], SamplingParams(max_tokens=max_tokens))
        stats.add(each.speculation)
        texts.append(each.token_ids)
    return stats, texts


def drafts_behind(llm: LLM, tokens: list[int], length: int, depth: int) -> list[int]:
    """What headstart drafts when the first `length` tokens are known."""
    request = Request(
        request_id="forced", prompt_ids=tuple(tokens[:1]), params=SamplingParams(), seed=0, stop_ids=frozenset()
    )
    engine, sequence = llm.engine, Sequence(request, 0, list(tokens[:length]), 0)
    assert engine.drafting.drafter and engine.memory.reserve(sequence, length + depth + 1)
    engine.runner.forward([Span(sequence, 0, length - 1, 0)])
    sequence.num_computed = length - 1
    engine.drafting.drafter.propose([Wish(sequence, depth)])
    engine.memory.release(sequence)
    return sequence.draft.tokens
