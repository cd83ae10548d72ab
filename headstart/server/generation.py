"""`Generation`: the choices of one HTTP request of any API, while the engine generates them."""

import time
from collections.abc import AsyncIterator, Sequence as Seq
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Self

from headstart.api import Choice, Completion
from headstart.core import Delta, Draft, DraftStats, SamplingParams, TokenLogprob
from headstart.engine.async_engine import RequestStream
from headstart.server.body_reader import WorkerPools
from headstart.server.journal import Journal
from headstart.server.model_manager import ServedModel
from headstart.server.prepare import PreparedRequest
from headstart.server.schema import ChatRequest, Common, CompletionRequest
from headstart.text.detokenizer import Detokenizer, TextOutput
from headstart.text.parsers import Event, Parser, ToolCall, merge_events
from headstart.text.tokenizer import Tokenizer

Json = dict[str, Any]
SCORE_DIGITS = 4  # decimals of a drafter's scores in reported passes


@dataclass(frozen=True, kw_only=True)
class ResponseOptions:
    """The fields that a request asks for in its response. Rendering needs nothing else of the body."""

    echo: bool = False  # the prompt before the text
    logprobs: bool = False  # of generated tokens
    prompt_logprobs: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False  # logprobs name tokens by id, not by text
    reasoning: bool = True
    usage: bool = False  # a last chunk with usage
    continuous_usage: bool = False  # usage in every chunk
    passes: bool = False  # chunks report the drafted and accepted tokens of each pass
    is_recordable: bool = True  # `serve --record` may keep the text

    @classmethod
    def of(cls, body: Common) -> Self:
        """The options of a body."""
        is_chat, stream = isinstance(body, ChatRequest), body.stream_options
        echo = isinstance(body, CompletionRequest) and bool(body.echo)
        return cls(
            echo=echo,
            logprobs=bool(body.logprobs) if is_chat else body.logprobs is not None,
            prompt_logprobs=body.prompt_logprobs is not None,
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            reasoning=is_chat and body.include_reasoning,
            usage=stream is not None and stream.include_usage,
            continuous_usage=stream is not None and stream.include_usage and stream.continuous_usage_stats,
            passes=body.speculation is not None and body.speculation.events,
            is_recordable=body.store is not False,
        )

    @property
    def needs_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs or (self.echo and self.logprobs)


class PassReporter:
    """Reports each model pass of one choice: drafted, accepted and rejected tokens (`speculation.events`).

    The joined token texts are the output before stop strings and parsers are applied."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: frozenset[int], continues: bool) -> None:
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._detokenizer = Detokenizer(tokenizer, skip_special=False, continues=continues)

    def report(self, delta: Delta, token_ids: Seq[int]) -> list[Json]:
        """A list with the JSON of one pass; empty without tokens. `token_ids`: the delta's tokens that were kept."""
        if not token_ids:
            return []
        draft, num_accepted = delta.draft or Draft(), delta.num_accepted
        scores = [round(score, SCORE_DIGITS) for score in draft.scores]
        guesses = [(token, scores[i] if i < len(scores) else None) for i, token in enumerate(draft.tokens)]
        tokens = []
        for i, token in enumerate(token_ids):
            text = "" if token in self._stop_ids else self._detokenizer.push(token)
            score = guesses[i][1] if i < num_accepted else None
            tokens.append({"id": token, "text": text, "accepted": i < num_accepted, "score": score})
        text_of = self._tokenizer.token_text
        rejected = [{"id": token, "text": text_of(token), "score": score} for token, score in guesses[num_accepted:]]
        counts = {"drafter": draft.method if guesses else None, "drafted": len(guesses), "accepted": num_accepted}
        return [{**counts, "tokens": tokens, "rejected": rejected}]


@dataclass(eq=False)
class GeneratedChoice:
    """One choice of one prompt while it grows."""

    index: int  # among all choices of the HTTP request
    prompt: str  # text to echo
    choice: Choice
    parser: Parser | None
    first: "GeneratedChoice | None" = None  # first choice of the prompt, which has its logprobs; None: this one
    passes: PassReporter | None = None
    events: list[Event] = field(default_factory=list)  # of the parser
    completion: Completion | None = None  # once the text has ended
    # State of OpenAI streams:
    has_begun: bool = False
    num_logprobs: int = 0  # already sent
    text_offset: int = 0  # characters of the tokens whose logprobs were sent
    call_ids: list[str] = field(default_factory=list)  # ids of the tool calls sent

    @property
    def finish_reason(self) -> str | None:
        """Why the choice ended, in OpenAI's words; None while it runs."""
        if self.completion is None:
            return None
        calls = any(isinstance(event, ToolCall) for event in self.events)
        return "tool_calls" if calls and self.completion.finish_reason == "stop" else self.completion.finish_reason

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Logprobs of the prompt's tokens so far. Only the prompt's first choice stores them."""
        return (self.first or self).choice.prompt_logprobs

    def take_logprobs(self) -> list[TokenLogprob]:
        """Logprobs of the tokens since the last call."""
        new = self.choice.logprobs[self.num_logprobs :]
        self.num_logprobs = len(self.choice.logprobs)
        return new


@dataclass
class ChoiceStep:
    """The text, events and tokens that one or several deltas add to a choice."""

    choice: GeneratedChoice
    text: str
    events: list[Event]
    token_ids: list[int]
    finish_reason: str | None  # only in the last step
    passes: list[Json] = field(default_factory=list)

    def extend(self, later: "ChoiceStep") -> None:
        """Append a later step of the same choice."""
        self.text += later.text
        self.events += later.events
        self.token_ids += later.token_ids
        self.passes += later.passes
        self.finish_reason = later.finish_reason


class Generation:
    """A prepared request in the engine. Iterate `steps` once."""

    def __init__(
        self, served: ServedModel, pools: WorkerPools, prepared: PreparedRequest, options: ResponseOptions, model: str,
        journal: Journal,
    ) -> None:  # fmt: skip
        self.id, self.created, self.model, self.new_id = journal.new_id(), journal.created, model, journal.new_id
        self._journal = journal
        self.options, self.pools, self.tokenizer = options, pools, served.llm.tokenizer
        self._served, self._requests = served, prepared.requests
        self._stream: RequestStream | None = None
        self._begun = 0.0  # when the requests went to the engine, by time.perf_counter()
        numbers, prompts = count(), prepared.prompts or [""] * len(prepared.requests)
        self._groups: list[list[GeneratedChoice]] = []  # choices by prompt
        for request, prompt in zip(prepared.requests, prompts, strict=True):
            group: list[GeneratedChoice] = []
            for _ in range(request.params.n):
                output = TextOutput(
                    self.tokenizer, request, prepared.continues,
                    skip_special=not prepared.keeps_special, keeps_stop=prepared.keeps_stop,
                )  # fmt: skip
                choice = Choice(request, output, time.perf_counter(), served.llm.method, served.llm.load_s)
                parser = prepared.make_parser() if prepared.make_parser else None
                passes = PassReporter(self.tokenizer, request.stop_ids, prepared.continues) if options.passes else None
                first = group[0] if group else None
                group.append(GeneratedChoice(next(numbers), prompt, choice, parser, first, passes))
            self._groups.append(group)

    @property
    def choices(self) -> list[GeneratedChoice]:
        """The choices of all prompts."""
        return [choice for group in self._groups for choice in group]

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters, the same for all prompts."""
        return self._requests[0].params

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_ids) for request in self._requests)

    async def begin(self) -> None:
        """Hand the requests to the engine. Raises what `ServedModel.open` raises."""
        self._begun = time.perf_counter()
        self._stream = await self._served.open(self._requests, self._journal)
        for index, group in enumerate(self._groups):
            for number, each in enumerate(group):
                each.choice.sequence = self._stream.sequence(index, number)

    async def steps(self) -> AsyncIterator[ChoiceStep]:
        """Yield steps as the engine generates them, and close the generation at the end. Raises HeadstartError."""
        stream, metrics, journal, num_known = self._stream, self._served.metrics, self._journal, 0
        assert stream is not None, "begin() comes first"
        try:
            async for index, delta in stream:
                is_new = num_known == len(journal.history)
                if is_new:
                    await journal.note(index, delta, with_scores=self.options.passes)
                num_known += not is_new
                choice = self._groups[index][delta.choice]
                piece = choice.choice.push(delta, time.perf_counter())
                if piece.finish_reason:
                    stream.stop(index, delta.choice)
                    choice.completion = choice.choice.completion()
                    metrics.finished(piece.finish_reason, self._begun, choice.choice)
                events: list[Event] = []
                if choice.parser is not None:
                    events = choice.parser.push(piece.text)
                    if piece.finish_reason:
                        is_cut_off = piece.finish_reason == "length"
                        events = merge_events([*events, *choice.parser.finish(is_cut_off=is_cut_off)])
                    choice.events += events
                if is_new:
                    self._observe_times(choice, len(piece.token_ids))
                passes = choice.passes.report(delta, piece.token_ids) if choice.passes else []
                yield ChoiceStep(choice, piece.text, events, piece.token_ids, choice.finish_reason, passes)
            self._record()
        finally:
            self.close()

    def close(self) -> None:
        """Remove the requests from the engine. Choices that have not ended are counted as aborted."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.close()
        for each in self.choices:
            if each.completion is None:
                self._served.metrics.finished("abort", self._begun, each.choice)

    def _record(self) -> None:
        """Offer the finished texts to the recorder, if the server has one and the request allows it."""
        if (recorder := self._served.metrics.recorder) and self.options.is_recordable:
            for each in self.choices:
                recorder.offer(each.choice.request, each.choice.tokens)

    def _observe_times(self, choice: GeneratedChoice, num_tokens: int) -> None:
        if not num_tokens:
            return
        arrivals, metrics = choice.choice.arrivals, self._served.metrics
        metrics.generated_tokens += num_tokens
        if len(arrivals) > 1:
            metrics.between.observe((arrivals[-1] - arrivals[-2]) / num_tokens)
        else:
            metrics.prompt_tokens += len(choice.choice.request.prompt_ids)
            metrics.first_token.observe(arrivals[-1] - self._begun)

    def token_counts(self) -> Json:
        """OpenAI's token counts so far, of all choices together."""
        num_prompt, num_output = self.num_prompt, sum(len(each.choice.tokens) for each in self.choices)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}

    def usage(self) -> Json:
        """OpenAI's `usage` of all finished choices, plus the seed and the drafting statistics."""
        firsts = [group[0].completion for group in self._groups if group[0].completion]
        stats = DraftStats()
        for each in self.choices:
            if each.completion:
                stats.add(each.completion.speculation)
        return {
            **self.token_counts(),
            "prompt_tokens_details": {"cached_tokens": sum(each.usage["cached_tokens"] for each in firsts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": stats.accepted,
                "rejected_prediction_tokens": stats.drafted - stats.accepted,
            },
            "seed": self._requests[0].seed,
            "speculation": stats.document(self._served.llm.method),
        }
