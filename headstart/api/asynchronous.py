"""`AsyncLLM`: `LLM` for asyncio."""

import asyncio
import os
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Sequence as Seq
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Self, Unpack

from headstart.api.llm import LLM, Message, Prompt, RequestOptions
from headstart.api.session import Choice, Completion, TextDelta, gather
from headstart.config import EngineConfig
from headstart.core import Progress, Request, SamplingParams, no_progress
from headstart.engine.async_engine import AsyncEngine
from headstart.engine.load import Model
from headstart.text.detokenizer import TextOutput


class AsyncLLM:
    """An LLM with coroutines. All requests run in one batch, in the engine's thread. Arguments and errors are those of
    `LLM`. Cancelling a task, or leaving a stream early, aborts the request.

        async with AsyncLLM() as llm:
            async for piece in llm.stream("Why is the sky blue?"):
                print(piece.text, end="")
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Model | None = None,
        config: EngineConfig | None = None,
        progress: Progress = no_progress,
        **options: Any,
    ) -> None:
        self.llm = LLM(model, config, progress, **options)
        self._engine = AsyncEngine(self.llm.shared)
        self._stop = weakref.finalize(self, self._engine.stop)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the LLM (see `LLM.close`) and end its engine thread."""
        await asyncio.to_thread(self.llm.close)  # first, so that running requests get their error from the thread
        await asyncio.to_thread(self._stop)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        images: Seq[Any] = (),
        lora: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """The completion of one prompt (see `LLM.generate`). For several prompts use `asyncio.gather`."""
        # in a thread, since chat templates, tokenizing and grammars may take long
        request = await asyncio.to_thread(self.llm.request, prompt, params, images=images, lora=lora, **options)
        async with aclosing(self._run(request, continues=options.get("raw", False))) as pieces:
            return gather([piece.completion async for piece in pieces if piece.completion is not None])

    async def chat(
        self,
        messages: Seq[Message],
        params: SamplingParams | None = None,
        *,
        lora: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """The answer to one conversation (see `LLM.chat`)."""
        return await self.generate(messages, params, lora=lora, **options)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        images: Seq[Any] = (),
        lora: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncIterator[TextDelta]:
        """Yield the output of one prompt piece by piece. Raises UsageError for n other than 1."""
        request = await asyncio.to_thread(self.llm.stream_request, prompt, params, images=images, lora=lora, **options)
        async with aclosing(self._run(request, continues=options.get("raw", False))) as pieces:
            async for piece in pieces:
                yield piece

    async def _run(self, request: Request, *, continues: bool) -> AsyncGenerator[TextDelta]:
        """Yield the pieces of all choices. The last piece of each choice has its completion."""
        llm, started = self.llm, time.perf_counter()
        outputs = [TextOutput(llm.tokenizer, request, continues) for _ in range(request.params.n)]
        choices = [Choice(request, output, started, llm.method, llm.load_s) for output in outputs]
        stream = await self._engine.open([request])
        try:
            async for index, delta in stream:
                choice = choices[delta.choice]
                choice.sequence = stream.sequence(index, delta.choice)
                piece = choice.push(delta, time.perf_counter())
                if piece.finish_reason is not None:
                    stream.stop(index, delta.choice)
                    piece = replace(piece, completion=choice.completion())
                yield piece
        finally:
            stream.close()
