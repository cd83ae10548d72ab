"""Built-in prompts, acceptance of a head on them, and the first difference of two outputs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from headstart.core import SamplingParams
from headstart.formats.json_object import read_packaged
from headstart.stats import DraftStats

if TYPE_CHECKING:
    from headstart.api import LLM


def builtin_prompts() -> tuple[tuple[str, str], ...]:
    """Returns (kind, prompt) pairs."""
    return tuple((item["kind"], item["prompt"]) for item in read_packaged("headstart.tools", "demo_prompts.json"))


def measure_acceptance(llm: "LLM", max_tokens: int, finished: Callable[[], None]) -> DraftStats:
    """Returns the drafting counts of greedy answers to the built-in prompts; calls `finished` after each answer."""
    llm.engine.head_health.is_enabled = False
    stats = DraftStats()
    prompts = [prompt for _, prompt in builtin_prompts()]
    params = SamplingParams(max_tokens=max_tokens)
    for completion in llm.generate(prompts, params, on_finish=lambda index, completion: finished()):
        stats.add(completion.speculation)
    return stats


def first_different_tokens(one: Sequence[int], other: Sequence[int]) -> tuple[int, int, int] | None:
    """Returns (position, token of `one`, token of `other`) at the first difference, with tokens -1 if one of the texts
    ends there; None for equal texts."""
    if (at := first_difference(one, other)) is None:
        return None
    return (at, one[at], other[at]) if at < min(len(one), len(other)) else (at, -1, -1)


def first_difference(one: Sequence[Any], other: Sequence[Any]) -> int | None:
    """Returns the first index at which two sequences differ or one of them ends; None if they are equal."""
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return None if place == len(one) == len(other) else place
