"""headstart in process: `LLM.generate` and `LLM.stream`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headstart.config import AUTO, EngineConfig
from headstart.core import (
    NOT_FINITE,
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
from headstart.engine.load import Model, load_model, with_head
from headstart.engine.make import change_head, identity, make_engine
from headstart.engine.sampling import token_mask
from headstart.engine.shared import Inbox, SharedEngine
from headstart.errors import DeadEndError, GenerationError, UsageError
from headstart.text.chat import ChatTemplate
from headstart.text.conversation import Conversation
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
    others: list[Completion] = field(default_factory=list, repr=False)  # after the first

    @property
    def choices(self) -> list[Completion]:
        return [self, *self.others]


@dataclass(frozen=True)
class TextDelta:
    """A piece of streamed text; `completion` comes with the last one."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    completion: Completion | None = None


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
        self._llm, self._continues = llm, continues
        self._inbox = Inbox()
        self.running: dict[tuple[str, int], Choice] = {}  # by request id and index

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._llm.shared.close(self._inbox)

    def submit(self, request: Request, since: float | None = None) -> None:
        """`since`: when it was due, if not now. Raises what `Engine.submit` raises."""
        started = time.perf_counter() if since is None else since
        for sequence in self._llm.shared.submit(request, self._inbox):
            output = TextOutput(self._llm.tokenizer, request, self._continues)
            self.running[request.request_id, sequence.choice] = Choice(request, output, started, sequence)

    def step(self) -> Iterator[tuple[Choice, TextDelta]]:
        """What has come, after a step of the engine where nothing waits to be taken. Choices that end are no longer
        running. Raises GenerationError where a step of another session took them with it."""
        self._llm.shared.wait(self._inbox)
        while self._inbox.deltas:
            now, delta = self._inbox.deltas.popleft()
            key = (delta.request_id, delta.choice)
            choice = self.running.get(key)
            if choice is None:  # a stop string has ended it meanwhile
                continue
            piece = choice.push(delta, now)
            if piece.finish_reason is not None:
                del self.running[key]
                self._llm.shared.abort(*key)  # a stop string ends the text before the engine knows
            yield choice, piece


class LLM:
    """A model with its engine. Raises ModelError or UsageError when the model cannot be loaded as asked.

    Several threads may use one: what they ask for runs in one batch, and each text is what it is alone.
    model: path, Hub name or alias; None is the default model. `Model` objects already loaded can be shared, by LLMs in
    several threads too; their passes go one after the other.
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
        self.shared = SharedEngine(self.engine)
        if self.config.depth == AUTO and self.engine.drafting.drafter:
            self.engine.drafting.auto.costs = known_costs(self.engine, identity(self.model, self.config))
        self.tokenizer = self.model.tokenizer
        self.load_s = time.perf_counter() - started
        self.chat_template: ChatTemplate | None = self.model.checkpoint.chat_template()
        self._ids = count()

    def change_head(self, path: str | None) -> None:
        """Draft with the head at `path` (None: the model's own) from the next step on; the texts stay the same. For
        whoever steps the engine. Raises UsageError or ModelError; the old one then goes on."""
        config = replace(self.config, head=path)
        model = with_head(self.model, config)
        change_head(self.engine, model, config)
        self.model, self.config = model, config

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
            "head": head.source if head and self.method == head.spec.kind else None,
            "depth": self.engine.drafting.depth if self.engine.drafting.drafter else 0,
            "draft_vocab": self.engine.drafting.num_vocab,
            "context": self.engine.max_length,
            **({"synthetic_acceptance": list(synthetic.rates)} if (synthetic := self.engine.synthetic) else {}),
        }

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt. Text is a user message of the chat template unless `raw` or there is no template."""
        if isinstance(prompt, str):
            if raw or self.chat_template is None:
                return self.tokenizer.encode(prompt, add_special=True)
            prompt = [{"role": "user", "content": prompt}]
        if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | bytearray):
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
        return Conversation(messages).encode(self.chat_template, self.tokenizer)[0]

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
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            if unknown := [token for token in getattr(params, name) or () if not 0 <= token < size]:
                raise UsageError(f"{name} names token {unknown[0]}, but ids end at {size - 1}")
        seed = next((s for s in (params.seed, self.config.seed) if s is not None), None)
        ends = frozenset() if params.ignore_eos and constraint is None else self.tokenizer.eos_ids
        stop_ids = ends | frozenset(params.stop_token_ids)
        allowed = params.allowed_token_ids
        rest = size - len(stop_ids) if allowed is None else len(set(allowed) - stop_ids)
        if params.min_tokens and constraint is None and rest <= 0:
            raise UsageError("no token is left to choose until min_tokens are out: each of them ends the text")
        return Request(
            request_id=f"request-{next(self._ids)}",
            prompt_ids=tuple(self.encode(prompt, raw=raw)),
            params=params,
            seed=secrets.randbits(JSON_SAFE_BITS) if seed is None else seed,
            stop_ids=stop_ids,
            banned_until_min=stop_ids if params.min_tokens else frozenset(),
            banned=self._banned(params.bad_words),
            allowed=None if allowed is None else token_mask(allowed, size),
            depth=depth,
            constraint=None if constraint is None else self.grammars.compile(constraint),
        )

    def _banned(self, words: Seq[str]) -> dict[tuple[int, ...], frozenset[int]]:
        """Of words as they are and behind a space: their tokens but the last, and the last ones."""
        banned: dict[tuple[int, ...], frozenset[int]] = {}
        for text in (spelled for word in words for spelled in (word, f" {word.lstrip()}")):
            *before, last = self.tokenizer.encode(text, parse_special=False)
            banned[tuple(before)] = banned.get(tuple(before), frozenset()) | {last}
        return banned

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
        if isinstance(prompts, str) or not isinstance(prompts, Seq):
            what = "one text" if isinstance(prompts, str) else type(prompts).__name__
            raise UsageError(f"prompts is {what}", "give a list: generate([prompt])")
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

    def decode_pair(self, prompt: Prompt, params: SamplingParams, number: int) -> dict[bool, Completion]:
        """The unit of every comparison with plain decoding: one prompt, by whether drafting was on. Which one is first
        alternates with `number`, so that what slows the machine down for a while hits both alike."""
        completions = {}
        for drafting in (False, True) if number % 2 == 0 else (True, False):
            self.engine.drafting.forget()  # the other's answer
            completions[drafting] = self.generate([prompt], params, depth=None if drafting else 0)[0]
        return completions

    def session(self, *, continues: bool = False) -> Session:
        """Requests that come one by one. `continues`: texts go on in the middle of their prompts (raw ones)."""
        return Session(self, continues=continues)

    def _run(self, requests: Seq[Request], *, continues: bool) -> Iterator[tuple[Request, TextDelta]]:
        """Submit all, step until all have ended."""
        started = time.perf_counter()
        with self.session(continues=continues) as session:
            for request in requests:
                session.submit(request, started)
            while session.running:
                for choice, delta in session.step():
                    if delta.finish_reason is not None:
                        delta = replace(delta, completion=choice.completion(self))
                    yield choice.request, delta


def _gather(choices: list[Completion]) -> Completion:
    """The first choice, holding all of them in order of their index."""
    first, *others = sorted(choices, key=lambda each: each.index)
    first.others = others
    for each in others:
        each.prompt_logprobs = first.prompt_logprobs
    return first
