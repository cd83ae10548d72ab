"""`AsyncLLM`: an LLM for asyncio."""

import asyncio
import os
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Sequence as Seq
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, Self

from headstart.api.llm import LLM, Constraint, Message, Prompt
from headstart.api.session import Choice, Completion, TextDelta, gather
from headstart.config import EngineConfig
from headstart.core import Progress, Request, SamplingParams, no_progress
from headstart.engine.async_engine import AsyncEngine
from headstart.engine.load import Model
from headstart.errors import UsageError
from headstart.text.detokenizer import TextOutput


class AsyncLLM:
    """An LLM whose texts are awaited: they run in one batch, in the engine's thread. Arguments and errors are those of
    `LLM`. A task that is cancelled, or leaves a stream, ends its text.

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
        await asyncio.to_thread(self.llm.close)  # texts that still run get their error, so before the thread ends
        await asyncio.to_thread(self._stop)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        depth: int | None = None,
        constraint: Constraint | None = None,
    ) -> Completion:
        """The completion of one prompt; for several, `asyncio.gather` them."""
        request = await self._request(prompt, params, raw=raw, depth=depth, constraint=constraint)
        async with aclosing(self._run(request, continues=raw)) as pieces:
            return gather([piece.completion async for piece in pieces if piece.completion is not None])

    async def chat(
        self,
        messages: Seq[Message],
        params: SamplingParams | None = None,
        *,
        depth: int | None = None,
        constraint: Constraint | None = None,
    ) -> Completion:
        """The answer to one conversation."""
        return await self.generate(messages, params, depth=depth, constraint=constraint)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        depth: int | None = None,
        constraint: Constraint | None = None,
    ) -> AsyncIterator[TextDelta]:
        """The text of one prompt as it grows (n = 1)."""
        request = await self._request(prompt, params, raw=raw, depth=depth, constraint=constraint)
        if request.params.n != 1:
            raise UsageError(f"n is {request.params.n}, but only one choice can be streamed")
        async with aclosing(self._run(request, continues=raw)) as pieces:
            async for piece in pieces:
                yield piece

    async def _request(self, prompt: Prompt, params: SamplingParams | None, **more: Any) -> Request:
        """In a thread: chat templates, tokenizing and grammars may take a while."""
        params = params or self.llm.default_params
        return await asyncio.to_thread(partial(self.llm.request, prompt, params, **more))

    async def _run(self, request: Request, *, continues: bool) -> AsyncGenerator[TextDelta]:
        """Pieces of all choices; each choice's last piece has its completion."""
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
