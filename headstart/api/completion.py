"""What comes back: finished texts and pieces of them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from headstart.core import DraftStats, FinishReason, TokenLogprob


@dataclass
class Completion:
    """One finished choice. On the first, `choices` holds all n of its request."""

    index: int
    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    seed: int
    usage: dict[str, int]
    method: str
    speculation: DraftStats
    timing: dict[str, float]  # seconds to load, to the first token, from first to last; tokens/s of the latter
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    others: list[Completion] = field(default_factory=list, repr=False)  # after the first

    @property
    def choices(self) -> list[Completion]:
        return [self, *self.others]

    @property
    def outputs(self) -> list[Completion]:
        """As vLLM calls the choices: `completion.outputs[0].text`."""
        return self.choices


@dataclass(frozen=True)
class TextDelta:
    """A piece of streamed text; `completion` comes with the last one."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    completion: Completion | None = None


def gather(choices: Seq[Completion]) -> Completion:
    """The first choice, holding all of them in order of their index."""
    first, *others = sorted(choices, key=lambda each: each.index)
    first.others = others
    for each in others:
        each.prompt_logprobs = first.prompt_logprobs
    return first
