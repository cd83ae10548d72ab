"""headstart in process: `LLM.generate` and `LLM.stream`."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from headstart.config import AUTO, EngineConfig
from headstart.core import (
    Delta,
    DraftStats,
    FinishReason,
    Progress,
    Request,
    SamplingParams,
    Sequence,
    TokenLogprob,
    no_progress,
)
from headstart.engine.calibrate import known_costs
from headstart.engine.load import Model, load_model
from headstart.engine.make import identity, make_engine
from headstart.errors import GenerationError, UsageError
from headstart.text.chat import ChatTemplate
from headstart.text.output import TextOutput

if TYPE_CHECKING:
    from headstart.text.grammar import GrammarCompiler, GrammarSpec

Prompt = str | Seq[int] | Seq[Mapping[str, Any]]
"""A user message (or raw text), token ids, or chat messages."""

JSON_SAFE_BITS = 53
"""Seeds we draw survive a JSON reader that keeps numbers as doubles."""


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
    choices: list[Completion] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class TextDelta:
    """A piece of streamed text; `completion` comes with the last one."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    completion: Completion | None = None


@dataclass
class Choice:
    """One choice while it runs."""

    request: Request
    output: TextOutput
    started: float
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0

    def push(self, delta: Delta) -> TextDelta:
        """Take the tokens of a delta in; the result's finish_reason says whether the text is complete."""
        piece = self.output.push(delta)
        tokens = list(delta.tokens[: piece.num_tokens])
        self.last = time.perf_counter()
        self.first = self.first or (self.last if tokens else 0.0)
        self.text += piece.text
        self.tokens += tokens
        self.logprobs += [each for each in delta.logprobs[: piece.num_tokens] if each]
        self.prompt_logprobs += [each for each in delta.prompt_logprobs if each]
        return TextDelta(piece.text, tokens, piece.finish_reason)

    def completion(self, sequence: Sequence, reason: FinishReason, method: str, load_s: float) -> Completion:
        decode_s = self.last - self.first
        return Completion(
            index=sequence.choice,
            text=self.text,
            token_ids=self.tokens,
            prompt_token_ids=list(self.request.prompt_ids),
            finish_reason=reason,
            seed=self.request.seed,
            usage={
                "prompt_tokens": sequence.num_prompt,
                "completion_tokens": len(self.tokens),
                "cached_tokens": sequence.num_cached,
            },
            method=method,
            speculation=sequence.stats,
            timing={
                "load_s": load_s,
                "ttft_s": self.first - self.started,
                "decode_s": decode_s,
                "decode_tokens_per_s": (len(self.tokens) - 1) / decode_s if decode_s > 0 else 0.0,
            },
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class LLM:
    """A model with its engine. Raises ModelError or UsageError when the model cannot be loaded as asked.

    model: path, Hub name or alias; None is the default model. `Model` objects already loaded can be shared.
    progress: told (done, total, of what) while weights are read.
    """

    def __init__(
        self,
        model: str | Model | None = None,
        config: EngineConfig | None = None,
        progress: Progress = no_progress,
    ) -> None:
        started = time.perf_counter()
        self.config = config or EngineConfig()
        self.model = model if isinstance(model, Model) else load_model(model, self.config, progress)
        self.engine = make_engine(self.model, self.config)
        if self.config.depth == AUTO and self.engine.drafting.drafter:
            self.engine.drafting.auto.costs = known_costs(self.engine, identity(self.model, self.config))
        self.tokenizer = self.model.tokenizer
        self.load_s = time.perf_counter() - started
        self.chat_template: ChatTemplate | None = self.model.checkpoint.chat_template()
        self._ids = count()
        self._inboxes: dict[str, deque[Delta]] = {}  # request id -> deltas that its call has not taken yet

    @property
    def method(self) -> str:
        """The drafter's name, or none."""
        return self.engine.drafting.drafter.method if self.engine.drafting.drafter else "none"

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    @property
    def info(self) -> dict[str, Any]:
        """Names and sizes worth printing."""
        head = self.model.head
        return {
            "model": self.model.name,
            "backend": self.model.backend.name,
            "drafter": self.method,
            "head": head.source if head and self.method == head.head.kind else None,
            "depth": self.engine.drafting.depth if self.engine.drafting.drafter else 0,
            "context": self.engine.max_length,
            **({"synthetic_acceptance": list(synthetic.rates)} if (synthetic := self.engine.synthetic) else {}),
        }

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt. Text is a user message of the chat template unless `raw` or there is no template."""
        if isinstance(prompt, str):
            if raw or self.chat_template is None:
                return self.tokenizer.encode(prompt, add_special=True)
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, Iterable):
            raise UsageError(f"a prompt is {prompt!r}", "give a text, token ids or messages: generate([prompt, ...])")
        parts = list(prompt)
        ids = [int(part) for part in parts if isinstance(part, int | np.integer)]
        if len(ids) == len(parts):
            return ids
        messages = [part for part in parts if isinstance(part, Mapping)]
        if len(messages) < len(parts):
            raise UsageError("a prompt is neither token ids nor messages", "give only ids, or only role and content")
        if self.chat_template is None:
            raise UsageError(f"{self.model.name} has no chat template", "use raw prompts (--raw)")
        return self.tokenizer.encode(self.chat_template.render(messages), add_special=False)

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """The compiler of constraints. Its library is loaded when it is first used."""
        from headstart.text.grammar import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self.model.config.vocab_size)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        raw: bool = False,
        depth: int | None = None,
        constraint: GrammarSpec | None = None,
    ) -> Request:
        """A request as the engine takes it; an unset seed is drawn here. With a constraint the text ends where the
        constraint says: ignore_eos has no effect, and min_tokens gives way. Raises UsageError for wrong values."""
        if isinstance(prompt, str) and not prompt:
            raise UsageError("the prompt is empty", "give at least one character")
        size = self.model.config.vocab_size
        for name, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if unknown := [token for token in tokens if not 0 <= token < size]:
                raise UsageError(f"{name} names token {unknown[0]}, but ids end at {size - 1}")
        seed = next((s for s in (params.seed, self.config.seed) if s is not None), None)
        ends = frozenset() if params.ignore_eos and constraint is None else self.tokenizer.eos_ids
        stop_ids = ends | frozenset(params.stop_token_ids)
        return Request(
            request_id=f"request-{next(self._ids)}",
            prompt_ids=tuple(self.encode(prompt, raw=raw)),
            params=params,
            seed=secrets.randbits(JSON_SAFE_BITS) if seed is None else seed,
            stop_ids=stop_ids,
            banned_until_min=stop_ids if params.min_tokens else frozenset(),
            depth=depth,
            constraint=None if constraint is None else self.grammars.compile(constraint),
        )

    def generate(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        raw: bool = False,
        depth: int | None = None,
        constraint: GrammarSpec | None = None,
        on_finish: Callable[[int, Completion], None] | None = None,
    ) -> list[Completion]:
        """All prompts together, continuously batched; results in the order of the prompts.

        `constraint` is what each text must be. `on_finish(index, completion)` is called as each prompt ends. Raises
        UsageError before anything runs when one of the prompts is wrong, GenerationError when a text breaks off.
        """
        if isinstance(prompts, str):
            raise UsageError("prompts is one text", "give a list: generate([prompt])")
        chosen = [params or SamplingParams()] * len(prompts) if not isinstance(params, Seq) else list(params)
        if len(chosen) != len(prompts):
            raise UsageError(f"{len(prompts)} prompts, but {len(chosen)} sets of sampling parameters")
        requests = [
            self.request(prompt, each, raw=raw, depth=depth, constraint=constraint)
            for prompt, each in zip(prompts, chosen, strict=True)
        ]
        order = {request.request_id: index for index, request in enumerate(requests)}
        choices: list[list[Completion]] = [[] for _ in requests]
        for request, delta in self._run(requests, continues=raw):
            if delta.completion is None:
                continue
            index = order[request.request_id]
            choices[index].append(delta.completion)
            if len(choices[index]) == request.params.n and on_finish:
                on_finish(index, _gather(choices[index]))
        return [_gather(each) for each in choices]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        depth: int | None = None,
        constraint: GrammarSpec | None = None,
    ) -> Iterator[TextDelta]:
        """The text of one prompt as it grows (n = 1). Closing the iterator aborts the request. Raises as `generate`."""
        params = params or SamplingParams()
        if params.n != 1:
            raise UsageError(f"n is {params.n}, but only one choice can be streamed")
        request = self.request(prompt, params, raw=raw, depth=depth, constraint=constraint)
        for _, delta in self._run([request], continues=raw):
            yield delta

    def _run(self, requests: Seq[Request], *, continues: bool) -> Iterator[tuple[Request, TextDelta]]:
        """Submit all, step until all have ended; whatever happens, nothing of them stays in the engine."""
        started = time.perf_counter()
        running: dict[tuple[str, int], tuple[Sequence, Choice]] = {}
        inbox: deque[Delta] = deque()
        try:
            for request in requests:
                self._inboxes[request.request_id] = inbox
                for sequence in self.engine.submit(request):
                    choice = Choice(request, TextOutput(self.tokenizer, request, continues), started)
                    running[request.request_id, sequence.choice] = sequence, choice
            while running:
                if not inbox:
                    self.engine.step(self._deliver)
                while inbox:
                    delta = inbox.popleft()
                    if (delta.request_id, delta.choice) in running:  # else a stop string has ended it meanwhile
                        yield self._take(delta, running)
        finally:
            for request in requests:
                self.engine.abort(request.request_id)
                self._inboxes.pop(request.request_id, None)

    def _deliver(self, deltas: list[Delta]) -> None:
        """A step serves whatever runs: each delta waits for the call that asked for it."""
        for delta in deltas:
            if (inbox := self._inboxes.get(delta.request_id)) is not None:
                inbox.append(delta)

    def _take(self, delta: Delta, running: dict[tuple[str, int], tuple[Sequence, Choice]]) -> tuple[Request, TextDelta]:
        key = (delta.request_id, delta.choice)
        sequence, choice = running[key]
        text = choice.push(delta)
        if text.finish_reason == "error":
            raise GenerationError(f"the text broke off after {len(choice.tokens)} tokens: {delta.error}")
        if text.finish_reason is None:
            return choice.request, text
        self.engine.abort(*key)  # a stop string ends the text before the engine knows
        del running[key]
        completion = choice.completion(sequence, text.finish_reason, self.method, self.load_s)
        return choice.request, replace(text, completion=completion)


def _gather(choices: list[Completion]) -> Completion:
    """The first choice, holding all of them in order of their index."""
    first = min(choices, key=lambda each: each.index)
    first.choices = sorted(choices, key=lambda each: each.index)
    return first
