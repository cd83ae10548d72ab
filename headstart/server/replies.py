"""Engine deltas to OpenAI's objects, whole or as a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence as Seq
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from headstart.api import LLM, Choice, Completion
from headstart.core import DraftStats, TokenLogprob
from headstart.server.bridge import Bridge, Stream
from headstart.server.prepare import Job
from headstart.server.schema import ChatRequest, Common, CompletionRequest
from headstart.text.output import TextOutput
from headstart.text.parsers import Content, Event, Parser, Reasoning, ToolCall, joined

Kind = Literal["chat", "completion"]
Json = dict[str, Any]


@dataclass(eq=False)
class Answer:
    """One choice of one prompt while it grows. `index` numbers all choices of the HTTP request."""

    index: int
    prompt: str  # echoed
    choice: Choice
    parser: Parser | None
    events: list[Event] = field(default_factory=list)
    num_logprobs: int = 0  # already sent
    begun: bool = False
    offset: int = 0  # characters of tokens whose logprobs were sent
    call_ids: list[str] = field(default_factory=list)
    completion: Completion | None = None

    @property
    def finish_reason(self) -> str | None:
        if self.completion is None:
            return None
        calls = any(isinstance(event, ToolCall) for event in self.events)
        return "tool_calls" if calls and self.completion.finish_reason == "stop" else self.completion.finish_reason

    def new_logprobs(self) -> list[TokenLogprob]:
        new = self.choice.logprobs[self.num_logprobs :]
        self.num_logprobs = len(self.choice.logprobs)
        return new


@dataclass(frozen=True)
class Step:
    """What one delta adds to an answer."""

    answer: Answer
    text: str
    events: list[Event]
    token_ids: list[int]


class Reply:
    """The answer to one HTTP request. Iterate `steps` once; `whole` and `chunks` do."""

    def __init__(self, bridge: Bridge, job: Job, body: Common, model: str) -> None:
        self.kind: Kind = "chat" if isinstance(body, ChatRequest) else "completion"
        self.id = f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model, self.body, self.job, self._bridge = model, body, job, bridge
        self._stream: Stream | None = None
        llm, texts = bridge.llm, job.prompts or [""] * len(job.requests)
        now = time.perf_counter()
        self._answers: list[list[Answer]] = []
        numbers = count()
        for request, prompt in zip(job.requests, texts, strict=True):
            self._answers.append([])
            for _ in range(request.params.n):
                output = TextOutput(llm.tokenizer, request, job.continues, skip_special=not job.keeps_special)
                parser = job.parser() if job.parser else None
                self._answers[-1].append(Answer(next(numbers), prompt, Choice(request, output, now), parser))

    @property
    def answers(self) -> list[Answer]:
        return [answer for group in self._answers for answer in group]

    async def begin(self) -> None:
        """Hand it to the engine. Raises what `Bridge.open` raises."""
        self._stream = await self._bridge.open(self.job.requests)
        for number, group in enumerate(self._answers):
            for index, answer in enumerate(group):
                answer.choice.sequence = self._stream.sequence(number, index)

    async def steps(self) -> AsyncIterator[Step]:
        """As the engine goes on. Raises HeadstartError; whatever happens, nothing is left in the engine."""
        stream = self._stream
        assert stream is not None, "begin() comes first"
        try:
            async for number, delta in stream:
                answer = self._answers[number][delta.choice]
                piece = answer.choice.push(delta, time.perf_counter())
                if piece.finish_reason:
                    stream.stop(number, delta.choice)
                    answer.completion = answer.choice.completion(self._bridge.llm)
                    self._bridge.watch.finished(piece.finish_reason, time.perf_counter() - stream.arrived)
                events: list[Event] = []
                if answer.parser is not None:
                    events = answer.parser.push(piece.text)
                    if piece.finish_reason:
                        events = joined([*events, *answer.parser.finish()])
                    answer.events += events
                self._timed(answer, len(piece.token_ids))
                yield Step(answer, piece.text, events, piece.token_ids)
        finally:
            self.close()

    def close(self) -> None:
        """Leave nothing in the engine; what has not ended is counted as given up."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.close()
        for answer in self.answers:
            if answer.completion is None:
                self._bridge.watch.finished("abort", time.perf_counter() - stream.arrived)

    def _timed(self, answer: Answer, tokens: int) -> None:
        if not tokens:
            return
        arrivals, watch = answer.choice.arrivals, self._bridge.watch
        watch.generated_tokens += tokens
        if len(arrivals) > 1:
            watch.between.observe((arrivals[-1] - arrivals[-2]) / tokens)
        elif self._stream is not None:
            watch.prompt_tokens += len(answer.choice.request.prompt_ids)
            watch.first_token.observe(arrivals[-1] - self._stream.arrived)

    async def whole(self) -> Json:
        """The one JSON document."""
        async for _ in self.steps():
            pass
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        make = self._message if self.kind == "chat" else self._text
        return {**self._head(name), "choices": [make(answer) for answer in self.answers], "usage": self.usage()}

    async def chunks(self) -> AsyncIterator[Json]:
        """The chunks of a stream."""
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        options = self.body.stream_options
        async for step in self.steps():
            make = self._message_deltas if self.kind == "chat" else self._text_deltas
            for choice in make(step):
                yield {**self._head(name), "choices": [choice]}
        if options and options.include_usage:
            yield {**self._head(name), "choices": [], "usage": self.usage()}

    def usage(self) -> Json:
        """Of all choices: OpenAI's counts, the seed, and what drafting did."""
        done = [answer.completion for answer in self.answers if answer.completion]
        prompts = [group[0].completion for group in self._answers if group[0].completion]
        stats = DraftStats()
        for each in done:
            stats.add(each.speculation)
        prompt_tokens = sum(each.usage["prompt_tokens"] for each in prompts)
        tokens = sum(each.usage["completion_tokens"] for each in done)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": sum(each.usage["cached_tokens"] for each in prompts)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": stats.accepted,
                "rejected_prediction_tokens": stats.drafted - stats.accepted,
            },
            "seed": self.job.requests[0].seed,
            "speculation": stats.document(self._bridge.llm.method),
        }

    def _head(self, name: str) -> Json:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    # Whole choices.

    def _text(self, answer: Answer) -> Json:
        assert isinstance(self.body, CompletionRequest)
        text, logprobs = (answer.prompt if self.body.echo else "") + answer.choice.text, None
        if self.body.logprobs is not None:
            logprobs = self._text_logprobs(answer, [*self._echoed(answer), *answer.choice.logprobs])
        choice = _choice(answer, {"text": text}, logprobs, answer.finish_reason)
        return choice | self._ids(answer, answer.choice.tokens, whole=True)

    def _echoed(self, answer: Answer) -> list[TokenLogprob | None]:
        """Logprobs of the prompt's tokens; the first has none."""
        assert isinstance(self.body, CompletionRequest)
        return [None, *answer.choice.prompt_logprobs] if self.body.echo and self.body.logprobs is not None else []

    def _message(self, answer: Answer) -> Json:
        message: Json = {"role": "assistant", "content": answer.choice.text}
        if answer.parser is not None:
            message = self._parsed(answer)
        logprobs = {"content": self._chat_logprobs(answer.choice.logprobs)} if self._wants_logprobs else None
        choice = _choice(answer, {"message": message}, logprobs, answer.finish_reason)
        return choice | self._ids(answer, answer.choice.tokens, whole=True)

    def _parsed(self, answer: Answer) -> Json:
        content, reasoning, calls = "", "", list[Json]()
        for event in answer.events:
            if isinstance(event, Content):
                content += event.text
            elif isinstance(event, Reasoning):
                reasoning += event.text
            elif isinstance(event, ToolCall):
                calls.append(_call(answer, event))
            else:
                calls[event.index]["function"]["arguments"] += event.text
        message: Json = {"role": "assistant", "content": content if content or not calls else None}
        if reasoning and self._wants_reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    # Pieces of choices.

    def _text_deltas(self, step: Step) -> list[Json]:
        assert isinstance(self.body, CompletionRequest)
        answer, text = step.answer, step.text
        logprobs: list[TokenLogprob | None] = [*answer.new_logprobs()]
        if not answer.begun:
            answer.begun = True
            text = (answer.prompt if self.body.echo else "") + text
            logprobs = [*self._echoed(answer), *logprobs]
        if not (text or logprobs or answer.finish_reason or (self.body.return_token_ids and step.token_ids)):
            return []
        shown = self._text_logprobs(answer, logprobs) if self.body.logprobs is not None else None
        choice = _choice(answer, {"text": text}, shown, answer.finish_reason)
        return [choice | self._ids(answer, step.token_ids, whole=False)]

    def _message_deltas(self, step: Step) -> list[Json]:
        answer = step.answer
        deltas: list[Json] = []
        if not answer.begun:
            answer.begun = True
            deltas.append({"role": "assistant", "content": ""})
        if answer.parser is None and step.text:
            deltas.append({"content": step.text})
        deltas += [each for event in step.events if (each := self._event(answer, event))]
        logprobs = answer.new_logprobs() if self._wants_logprobs else []
        carries = answer.finish_reason or logprobs or (self.body.return_token_ids and step.token_ids)
        if carries and (not deltas or "role" in deltas[-1]):  # what ends or counts goes with text, not with the role
            deltas.append({})
        choices = [_choice(answer, {"delta": delta}, None, None) for delta in deltas]
        if choices:
            last = choices[-1]
            last["finish_reason"] = answer.finish_reason
            if logprobs:
                last["logprobs"] = {"content": self._chat_logprobs(logprobs)}
            last |= self._ids(answer, step.token_ids, whole=False)
        return choices

    def _event(self, answer: Answer, event: Event) -> Json | None:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text} if self._wants_reasoning else None
        if isinstance(event, ToolCall):
            return {"tool_calls": [{"index": event.index, **_call(answer, event)}]}
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}

    # Details.

    @property
    def _wants_logprobs(self) -> bool:
        return isinstance(self.body, ChatRequest) and bool(self.body.logprobs)

    @property
    def _wants_reasoning(self) -> bool:
        return isinstance(self.body, ChatRequest) and self.body.include_reasoning

    def _ids(self, answer: Answer, token_ids: Seq[int], *, whole: bool) -> Json:
        document: Json = {}
        if self.body.return_token_ids:
            document["token_ids"] = list(token_ids)
        if self.body.return_token_ids and whole:
            document["prompt_token_ids"] = list(answer.choice.request.prompt_ids)
        if self.body.prompt_logprobs is not None and whole:
            document["prompt_logprobs"] = [None, *map(self._prompt_logprob, answer.choice.prompt_logprobs)]
        return document

    def _prompt_logprob(self, entry: TokenLogprob) -> Json:
        """vLLM's shape: token id -> its logprob and text, the token itself first."""
        pairs = dict([(entry.token, entry.logprob), *entry.top])
        return {str(token): {"logprob": value, "decoded_token": self._shown(token)} for token, value in pairs.items()}

    def _chat_logprobs(self, entries: Seq[TokenLogprob]) -> list[Json]:
        return [
            {**_token(self._bridge.llm, each.token, each.logprob),
             "top_logprobs": [_token(self._bridge.llm, token, value) for token, value in each.top]}
            for each in entries
        ]  # fmt: skip

    def _text_logprobs(self, answer: Answer, entries: Seq[TokenLogprob | None]) -> Json:
        """None stands for the prompt's first token, which has no logprob. Offsets go on from chunk to chunk."""
        tokens, values, tops, offsets = list[str](), list[float | None](), list[Json | None](), list[int]()
        for entry in entries:
            text = self._shown(entry.token if entry else answer.choice.request.prompt_ids[0])
            tokens.append(text)
            offsets.append(answer.offset)
            answer.offset += len(text)
            values.append(entry.logprob if entry else None)
            tops.append({self._shown(token): value for token, value in entry.top} if entry and entry.top else None)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _shown(self, token: int) -> str:
        return self._bridge.llm.tokenizer.token_text(token)


def _choice(answer: Answer, content: Json, logprobs: Json | None, finish_reason: str | None) -> Json:
    return {"index": answer.index, **content, "logprobs": logprobs, "finish_reason": finish_reason}


def _token(llm: LLM, token: int, logprob: float) -> Json:
    known = llm.tokenizer
    return {"token": known.token_text(token), "logprob": logprob, "bytes": list(known.token_bytes(token))}


def _call(answer: Answer, event: ToolCall) -> Json:
    if event.index == len(answer.call_ids):
        answer.call_ids.append(f"call_{uuid.uuid4().hex[:24]}")
    function = {"name": event.name, "arguments": ""}
    return {"id": answer.call_ids[event.index], "type": "function", "function": function}
