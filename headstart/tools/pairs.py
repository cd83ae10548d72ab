"""The unit of every comparison with plain decoding: one prompt, decoded without drafting and with it."""

from __future__ import annotations

from headstart.api import LLM, Completion, Prompt
from headstart.core import SamplingParams


def decode_pair(llm: LLM, prompt: Prompt, params: SamplingParams, number: int) -> dict[bool, Completion]:
    """Completions by whether drafting was on. Which one is first alternates with `number`, so that what slows the
    machine down for a while hits both alike."""
    order = (False, True) if number % 2 == 0 else (True, False)
    return {drafting: llm.generate([prompt], params, depth=None if drafting else 0)[0] for drafting in order}
