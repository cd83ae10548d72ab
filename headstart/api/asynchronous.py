"""`AsyncLLM`: the same for asyncio."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from headstart.api.completion import Completion, TextDelta
from headstart.api.llm import LLM, Constraint, Message, Prompt
from headstart.config import EngineConfig
from headstart.core import Progress, SamplingParams, no_progress
from headstart.engine.load import Model


class AsyncLLM:
    """An LLM whose texts are awaited: they run in one batch, and the event loop goes on meanwhile. Arguments and errors
    are those of `LLM`. A task that is cancelled, or leaves a stream, ends its text.

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
        self._threads = ThreadPoolExecutor(self.llm.config.max_num_seqs, "headstart")  # one for each text that runs

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """As `LLM.close`."""
        await asyncio.to_thread(self.llm.close)
        self._threads.shutdown(wait=False)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        depth: int | None = None,
        constraint: Constraint | None = None,
    ) -> Completion:
        """One prompt; for several, `asyncio.gather` them."""
        abort = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads,
                lambda: self.llm.generate(
                    [prompt], params, raw=raw, depth=depth, constraint=constraint, abort=abort
                )[0],
            )  # fmt: skip
        except asyncio.CancelledError:
            abort.set()
            raise

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
        loop, left = asyncio.get_running_loop(), threading.Event()
        pieces: asyncio.Queue[TextDelta | None] = asyncio.Queue()

        def put(piece: TextDelta | None) -> None:
            if not left.is_set():
                loop.call_soon_threadsafe(pieces.put_nowait, piece)

        def pump() -> None:
            try:
                for piece in self.llm.stream(prompt, params, raw=raw, depth=depth, constraint=constraint):
                    if left.is_set():
                        return
                    put(piece)
            finally:
                put(None)

        running = self._threads.submit(pump)
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await asyncio.wrap_future(running)  # raises what broke it off
        finally:
            left.set()
