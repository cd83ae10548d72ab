"""`Session`: submits requests to an LLM's engine at any time. `Choice`: one output while it grows."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from typing import Self

from headstart.core import NOT_FINITE, NOT_FINITE_HINT, Delta, DraftStats, FinishReason, Request, Sequence, TokenLogprob
from headstart.engine.shared import Inbox, SharedEngine
from headstart.errors import DeadEndError, GenerationError
from headstart.text.detokenizer import TextOutput
from headstart.text.tokenizer import Tokenizer


@dataclass
class Choice:
    """One output of a request while it grows."""

    request: Request
    output: TextOutput
    started: float  # when the request was sent or due, by time.perf_counter()
    method: str  # drafting method
    load_s: float = 0.0  # seconds that the model took to load
    sequence: Sequence | None = None  # the engine's state; None until the engine has the request
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # time.perf_counter() of each delta with tokens
    finish_reason: FinishReason | None = None
    error: str = ""

    def push(self, delta: Delta, now: float) -> TextDelta:
        """Add a delta's tokens. Returns the new piece of text; it has a finish_reason if the text is complete."""
        piece = self.output.push(delta)
        tokens = list(delta.tokens[: piece.num_tokens])
        self.arrivals += [now] if tokens else []
        self.text += piece.text
        self.tokens += tokens
        self.logprobs += [each for each in delta.logprobs[: piece.num_tokens] if each]
        self.prompt_logprobs += [each for each in delta.prompt_logprobs if each]
        self.finish_reason, self.error = piece.finish_reason, delta.error
        return TextDelta(piece.text, tokens, piece.finish_reason)

    def completion(self) -> Completion:
        """The result of a text that has ended. Raises GenerationError if the text broke off."""
        assert self.sequence is not None and self.finish_reason is not None, "the choice still runs"
        if self.finish_reason == "error":
            count = f"{len(self.tokens)} token{'' if len(self.tokens) == 1 else 's'}"
            what = f"the text broke off after {count}: {self.error}"
            raise GenerationError(what, NOT_FINITE_HINT) if self.error == NOT_FINITE else DeadEndError(what)
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
            method=self.method,
            speculation=self.sequence.stats,
            timing={
                "load_s": self.load_s,
                "ttft_s": first - self.started,
                "decode_s": last - first,
                "decode_tokens_per_s": (len(self.tokens) - 1) / (last - first) if last > first else 0.0,
            },
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class Session:
    """Submits requests at any time, and steps the engine while choices are running. Leaving its context aborts its
    requests. Several threads may each have a session of one engine, but must not share a session."""

    def __init__(
        self, shared: SharedEngine, tokenizer: Tokenizer, load_s: float = 0.0, *, continues: bool = False
    ) -> None:
        self._shared, self._tokenizer, self._load_s, self._continues = shared, tokenizer, load_s, continues
        self._inbox = Inbox()
        self.running: dict[tuple[str, int], Choice] = {}  # by request id and index of the choice

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._shared.close(self._inbox)

    def submit(self, request: Request, since: float | None = None) -> None:
        """Hand a request to the engine. `since`: time.perf_counter() at which it was due. Raises as `Engine.submit`."""
        started = time.perf_counter() if since is None else since
        method = self._shared.engine.drafting.method
        for sequence in self._shared.submit(request, self._inbox):
            output = TextOutput(self._tokenizer, request, self._continues)
            choice = Choice(request, output, started, method, self._load_s, sequence)
            self.running[request.request_id, sequence.choice] = choice

    def step(self) -> Iterator[tuple[Choice, TextDelta]]:
        """Yield new pieces of text, after an engine step if none are there. Finished choices leave `running`. Raises
        GenerationError if a failed step of another session has ended this session's requests."""
        self._shared.wait(self._inbox)
        while self._inbox.deltas:
            now, delta = self._inbox.deltas.popleft()
            key = (delta.request_id, delta.choice)
            choice = self.running.get(key)
            if choice is None:  # a stop string has already ended this choice
                continue
            piece = choice.push(delta, now)
            if piece.finish_reason is not None:
                del self.running[key]
                self._shared.abort(*key)  # a stop string ends the text before the engine knows
            yield choice, piece


@dataclass
class Completion:
    """One finished choice of a request. The request's first choice also holds the others."""

    index: int
    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    seed: int
    usage: dict[str, int]
    method: str
    speculation: DraftStats
    timing: dict[str, float]  # load_s, ttft_s, decode_s (first to last token), decode_tokens_per_s
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    others: list[Completion] = field(default_factory=list, repr=False)  # the request's other choices, if this is first

    @property
    def is_truncated(self) -> bool:
        """Whether max_tokens or the context length ended the text. A constrained text is then incomplete."""
        return self.finish_reason == "length"

    @property
    def choices(self) -> list[Completion]:
        """All n choices of the request, if this is the first one."""
        return [self, *self.others]

    @property
    def outputs(self) -> list[Completion]:
        """The choices under vLLM's name: `completion.outputs[0].text`."""
        return self.choices


@dataclass(frozen=True)
class TextDelta:
    """A piece of streamed text. The last piece has finish_reason and completion."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    completion: Completion | None = None


def gather(choices: Seq[Completion]) -> Completion:
    """The choice with the lowest index, with the others of its request attached in order of their index."""
    first, *others = sorted(choices, key=lambda each: each.index)
    first.others = others
    for each in others:
        each.prompt_logprobs = first.prompt_logprobs
    return first
