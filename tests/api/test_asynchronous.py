"""AsyncLLM: texts equal those of LLM; cancellation, errors, event loops, closing."""

import asyncio
import time

import pytest
from support import SMALL, assert_clean, headed_model

from headstart import LLM, AsyncLLM, EngineConfig, SamplingParams
from headstart.engine.runner import Runner
from headstart.errors import GenerationError, UsageError

CONFIG = EngineConfig(**{**SMALL, "dtype": "float64", "max_model_len": 256})
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=3)
PROMPTS = ["the thing", "an answer", "x"]


def expected() -> list[str]:
    return [done.text for done in LLM(headed_model("mimo"), CONFIG).generate(PROMPTS, PARAMS)]


@pytest.mark.slow
def test_async_texts_equal_those_of_llm() -> None:
    async def run() -> None:
        async with AsyncLLM(headed_model("mimo"), CONFIG) as llm:
            answers = await asyncio.gather(*(llm.generate(prompt, PARAMS) for prompt in PROMPTS))
            assert [done.text for done in answers] == expected()
            pieces = [piece async for piece in llm.stream(PROMPTS[0], PARAMS)]
            assert "".join(piece.text for piece in pieces) == expected()[0]
            assert pieces[-1].completion is not None and pieces[-1].completion.text == expected()[0]
            chat = await llm.chat([{"role": "user", "content": PROMPTS[0]}], PARAMS)
            assert chat.text == expected()[0]

    asyncio.run(run())


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of at least 20 ms, so that no long text ends before its cancellation."""
    forward = Runner.forward
    monkeypatch.setattr(Runner, "forward", lambda *spans: time.sleep(0.02) or forward(*spans))


def test_cancellation_frees_requests_and_errors_are_raised(slow_steps: None) -> None:
    async def run() -> None:
        llm = AsyncLLM(headed_model("mimo"), CONFIG)
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        async for _ in (stream := llm.stream("the", long)):
            break
        await stream.aclose()
        task = asyncio.create_task(llm.generate("the", long))
        while not llm.llm.engine.has_work:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(UsageError, match="the prompt is empty"):
            await llm.generate("")
        with pytest.raises(UsageError, match="only one choice"):
            async for _ in llm.stream("the", SamplingParams(n=2)):
                pass
        while llm.llm.engine.has_work or llm.llm.engine.live:
            await asyncio.sleep(0.01)
        assert_clean(llm.llm.engine)
        await llm.close()

    asyncio.run(run())


@pytest.mark.slow
def test_successive_event_loops_and_threads_share_the_engine() -> None:
    """The engine's thread serves both loops. Threads that use `.llm` share its batch."""
    llm = AsyncLLM(headed_model("mimo"), CONFIG)

    async def run() -> list[str]:
        asked = [llm.generate(prompt, PARAMS) for prompt in PROMPTS]
        own = asyncio.to_thread(llm.llm.generate, PROMPTS, PARAMS)
        *awaited, made = await asyncio.gather(*asked, own)
        assert [done.text for done in made] == expected()
        return [done.text for done in awaited]

    assert asyncio.run(run()) == asyncio.run(run()) == expected()
    assert_clean(llm.llm.engine)
    asyncio.run(llm.close())


def test_close_ends_running_requests(slow_steps: None) -> None:
    async def run() -> None:
        llm = AsyncLLM(headed_model("mimo"), CONFIG)
        task = asyncio.create_task(llm.generate("the", SamplingParams(max_tokens=200, ignore_eos=True)))
        while not llm.llm.engine.has_work:
            await asyncio.sleep(0.01)
        await llm.close()
        with pytest.raises(GenerationError):
            await task
        with pytest.raises(UsageError, match="closed"):
            await llm.generate("the")

    asyncio.run(run())
