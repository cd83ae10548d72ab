"""Engine deltas to OpenAI's objects, whole or as a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

from headstart.api import Choice
from headstart.core import DraftStats, SamplingParams
from headstart.server.bridge import Bridge, Stream
from headstart.server.documents import Answer, Asked, Documents, Json, Step, dumped
from headstart.server.intake import Lanes
from headstart.server.passes import Passes
from headstart.server.prepare import Job
from headstart.text.output import TextOutput
from headstart.text.parsers import Event, joined

LARGE = 2000
"""Logprobs of prompts from which a document is made in another thread."""


class Reply:
    """The answer to one HTTP request. Iterate `steps` once; `whole` and `chunks` do."""

    def __init__(self, bridge: Bridge, lanes: Lanes, job: Job, asked: Asked, model: str) -> None:
        self.id = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model, self.asked, self._bridge, self._lanes = model, asked, bridge, lanes
        self._requests = job.requests
        self._stream: Stream | None = None
        llm, texts = bridge.llm, job.prompts or [""] * len(job.requests)
        self.tokenizer = llm.tokenizer
        self._documents = Documents(llm.tokenizer, asked)
        now = time.perf_counter()
        self._answers: list[list[Answer]] = []
        numbers = count()
        for request, prompt in zip(job.requests, texts, strict=True):
            group: list[Answer] = []
            for _ in range(request.params.n):
                output = TextOutput(
                    llm.tokenizer,
                    request,
                    job.continues,
                    skip_special=not job.keeps_special,
                    keeps_stop=job.keeps_stop,
                )
                parser = job.parser() if job.parser else None
                first = group[0] if group else None
                passes = Passes(llm.tokenizer, request.stop_ids, job.continues) if asked.passes else None
                group.append(Answer(next(numbers), prompt, Choice(request, output, now), parser, first, passes))
            self._answers.append(group)

    @property
    def answers(self) -> list[Answer]:
        return [answer for group in self._answers for answer in group]

    @property
    def params(self) -> SamplingParams:
        """As they are for all of its prompts."""
        return self._requests[0].params

    @property
    def num_prompt(self) -> int:
        """Tokens of all prompts."""
        return sum(len(request.prompt_ids) for request in self._requests)

    async def begin(self) -> None:
        """Hand it to the engine. Raises what `Bridge.open` raises."""
        self._stream = await self._bridge.open(self._requests)
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
                passes = answer.passes.told(delta, piece.token_ids) if answer.passes else []
                yield Step(answer, piece.text, events, piece.token_ids, answer.finish_reason, passes)
            self._record()
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

    def _record(self) -> None:
        """All choices have ended well: keep them where that is asked for."""
        if (recorder := self._bridge.watch.recorder) and self.asked.may_be_kept:
            for answer in self.answers:
                recorder.offer(answer.choice.request, answer.choice.tokens)

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

    async def whole(self) -> bytes:
        """The one JSON document."""
        async for _ in self.steps():
            pass
        if self.asked.logprobs or self.asked.prompt_logprobs:
            return await self._lanes.run("answer", self._document)
        return self._document()

    def _document(self) -> bytes:
        name = "chat.completion" if self.asked.is_chat else "text_completion"
        choices = [self._documents.whole(answer) for answer in self.answers]
        return dumped({**self._head(name), "choices": choices, "usage": self.usage()}).encode()

    async def chunks(self) -> AsyncIterator[str]:
        """The documents of a stream. What a choice begins with does not depend on how the prompt was computed: nothing
        of it leaves before the prompt's logprobs are known, if they are told."""
        held: dict[int, Step] = {}
        async for step in self.steps():
            ready = [step]
            if self.asked.of_prompt and not step.answer.begun:
                held.setdefault(step.answer.index, Step(step.answer, "", [], [], None)).join(step)
                ready = [held.pop(index) for index, each in list(held.items()) if each.answer.prompt_is_known]
            for each in ready:
                for chunk in await self._made(each):
                    yield chunk
        if self.asked.usage:
            yield dumped({**self._head(self._chunk_name), "choices": [], "usage": self.usage()})

    async def _made(self, step: Step) -> list[str]:
        size = len(step.answer.prompt_logprobs) if self.asked.of_prompt and not step.answer.begun else 0
        if size > LARGE:
            return await self._lanes.run("answer", self._chunks_of, step)
        return self._chunks_of(step)

    def _chunks_of(self, step: Step) -> list[str]:
        more: Json = {"usage": self._counts()} if self.asked.continuous_usage else {}
        pieces = self._documents.pieces(step)
        return [dumped({**self._head(self._chunk_name), "choices": [choice], **more}) for choice in pieces]

    @property
    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.asked.is_chat else "text_completion"

    def _counts(self) -> dict[str, Any]:
        tokens = sum(len(answer.choice.tokens) for answer in self.answers)
        return {"prompt_tokens": self.num_prompt, "completion_tokens": tokens, "total_tokens": self.num_prompt + tokens}

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
            "seed": self._requests[0].seed,
            "speculation": stats.document(self._bridge.llm.method),
        }

    def _head(self, name: str) -> Json:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}
