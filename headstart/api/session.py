"""Requests through the engine of an LLM, sent whenever one likes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from headstart.api.completion import Completion, TextDelta
from headstart.core import NOT_FINITE, Delta, FinishReason, Request, Sequence, TokenLogprob
from headstart.engine.shared import Inbox
from headstart.errors import DeadEndError, GenerationError
from headstart.text.output import TextOutput

if TYPE_CHECKING:
    from headstart.api.llm import LLM


@dataclass
class Choice:
    """One choice while it runs. `started`, `arrivals`: when it was sent or due, and when the engine gave tokens."""

    request: Request
    output: TextOutput
    started: float
    sequence: Sequence | None = None  # once the engine has it
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str = ""

    def push(self, delta: Delta, now: float) -> TextDelta:
        """Take the tokens of a delta in; the result's finish_reason says whether the text is complete."""
        piece = self.output.push(delta)
        tokens = list(delta.tokens[: piece.num_tokens])
        self.arrivals += [now] if tokens else []
        self.text += piece.text
        self.tokens += tokens
        self.logprobs += [each for each in delta.logprobs[: piece.num_tokens] if each]
        self.prompt_logprobs += [each for each in delta.prompt_logprobs if each]
        self.finish_reason, self.error = piece.finish_reason, delta.error
        return TextDelta(piece.text, tokens, piece.finish_reason)

    def completion(self, llm: LLM) -> Completion:
        """Of a text that has ended. Raises GenerationError where it broke off."""
        assert self.sequence is not None and self.finish_reason is not None, "it still runs"
        if self.finish_reason == "error":
            kind = GenerationError if self.error == NOT_FINITE else DeadEndError
            count = f"{len(self.tokens)} token{'' if len(self.tokens) == 1 else 's'}"
            raise kind(f"the text broke off after {count}: {self.error}")
        first, last = (self.arrivals[0], self.arrivals[-1]) if self.arrivals else (self.started, self.started)
        return Completion(
            index=self.sequence.choice,
            text=self.text,
            token_ids=self.tokens,
            prompt_token_ids=list(self.request.prompt_ids),
            finish_reason=self.finish_reason,
            seed=self.request.seed,
            usage={
                "prompt_tokens": self.sequence.num_prompt,
                "completion_tokens": len(self.tokens),
                "cached_tokens": self.sequence.num_cached,
            },
            method=llm.method,
            speculation=self.sequence.stats,
            timing={
                "load_s": llm.load_s,
                "ttft_s": first - self.started,
                "decode_s": last - first,
                "decode_tokens_per_s": (len(self.tokens) - 1) / (last - first) if last > first else 0.0,
            },
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class Session:
    """Requests through the engine of an LLM, sent whenever one likes: `submit`, and `step` while choices are running.
    Nothing is left in the engine when its context ends. Several sessions share the engine, in one thread or in many; a
    session is for one thread at a time."""

    def __init__(self, llm: LLM, *, continues: bool = False) -> None:
        self._llm, self._shared, self._continues = llm, llm.shared, continues
        self._inbox = Inbox()
        self.running: dict[tuple[str, int], Choice] = {}  # by request id and index

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._shared.close(self._inbox)

    def submit(self, request: Request, since: float | None = None) -> None:
        """`since`: when it was due, if not now. Raises what `Engine.submit` raises."""
        started = time.perf_counter() if since is None else since
        for sequence in self._shared.submit(request, self._inbox):
            output = TextOutput(self._llm.tokenizer, request, self._continues)
            self.running[request.request_id, sequence.choice] = Choice(request, output, started, sequence)

    def step(self) -> Iterator[tuple[Choice, TextDelta]]:
        """What has come, after a step of the engine where nothing waits to be taken. Choices that end are no longer
        running. Raises GenerationError where a step of another session took them with it."""
        self._shared.wait(self._inbox)
        while self._inbox.deltas:
            now, delta = self._inbox.deltas.popleft()
            key = (delta.request_id, delta.choice)
            choice = self.running.get(key)
            if choice is None:  # a stop string has ended it meanwhile
                continue
            piece = choice.push(delta, now)
            if piece.finish_reason is not None:
                del self.running[key]
                self._shared.abort(*key)  # a stop string ends the text before the engine knows
            yield choice, piece
