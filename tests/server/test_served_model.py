"""The engine behind the event loop: failing steps, cancellation, full queues, change of the head."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import support
from inside import tokens_of

from headstart.api import LLM
from headstart.config import FIXED_DEPTH, EngineConfig
from headstart.core import Delta, SamplingParams
from headstart.engine.async_engine import RequestStream
from headstart.engine.load import Model
from headstart.errors import BusyError, GenerationError, UsageError
from headstart.heads.base import HeadSpec
from headstart.heads.kind import head_kind
from headstart.models.small import random_arrays
from headstart.server.app import ServerConfig, single_model_manager
from headstart.server.model_manager import ServedModel

CONFIG = EngineConfig(**{**support.SMALL, "backend": "reference", "dtype": "float64", "threads": 1})


def with_served(
    check: Callable[[ServedModel], Coroutine[Any, Any, None]],
    *,
    queue: int = 100,
    model: Model | None = None,
) -> None:
    llm = LLM(model or support.headed_model("llama"), replace(CONFIG, depth=FIXED_DEPTH))

    async def main() -> None:
        (served,) = single_model_manager(llm, ServerConfig(max_queue=queue)).loaded
        served.start()
        try:
            async with asyncio.timeout(support.PATIENCE):
                await check(served)
        finally:
            served.stop()

    asyncio.run(main())
    support.assert_clean(llm.engine)


def request(served: ServedModel, seed: int, tokens: int = 20, **more: Any) -> Any:
    params = SamplingParams(**{"max_tokens": tokens, "seed": seed, "temperature": 1.0, "ignore_eos": True, **more})
    return served.llm.request(support.prompt_of(10, seed), params)


def test_failing_step_fails_only_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(served: ServedModel) -> None:
        expected = await tokens_of(await served.open([request(served, 1)]))
        runner, left = served.llm.engine.runner, []
        forward = runner.forward

        def broken(spans: Any) -> Any:
            if left:
                raise RuntimeError(left.pop())
            return forward(spans)

        monkeypatch.setattr(runner, "forward", broken)
        for faults in (1, 2):
            left += ["a bug"] * faults
            for number in range(faults):
                with pytest.raises(GenerationError, match="engine failed"):
                    await tokens_of(await served.open([request(served, 2)]))
                assert served.engine.num_failed_steps == number + 1
            assert await tokens_of(await served.open([request(served, 1)])) == expected
            assert served.engine.num_failed_steps == 0

    with_served(check)


def test_hanging_step_is_reported_as_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(served: ServedModel) -> None:
        runner, hangs, goes_on = served.llm.engine.runner, threading.Event(), threading.Event()
        forward = runner.forward

        def hanging(spans: Any) -> Any:
            hangs.set()
            goes_on.wait(support.PATIENCE)
            return forward(spans)

        monkeypatch.setattr(runner, "forward", hanging)
        text = asyncio.create_task(tokens_of(await served.open([request(served, 1)])))
        try:
            await asyncio.to_thread(hangs.wait, support.PATIENCE)
            assert served.fault == ""
            monkeypatch.setattr("headstart.server.model_manager.MAX_STEP_S", 0.01)
            await asyncio.sleep(0.02)
            assert served.fault.startswith("the engine hangs")
        finally:
            goes_on.set()
        assert len(await text) == 20
        while served.engine.busy_s:
            await asyncio.sleep(0.01)
        assert served.fault == ""

    with_served(check)


def test_request_that_finishes_in_a_failing_step_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(served: ServedModel) -> None:
        engine = served.llm.engine
        commit = engine._commit

        def broken(span: Any, *rest: Any) -> Any:
            if span.sequence.request.seed == 2 and span.sequence.num_output > 3:
                raise MemoryError
            return commit(span, *rest)

        monkeypatch.setattr(engine, "_commit", broken)
        streams = [await served.open([request(served, seed, tokens)]) for seed, tokens in ((1, 8), (2, 40))]
        done = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
        assert isinstance(done[1], GenerationError)
        assert isinstance(done[0], GenerationError) or len(done[0]) == 8
        monkeypatch.setattr(engine, "_commit", commit)
        assert len(await tokens_of(await served.open([request(served, 1)]))) == 20

    with_served(check)


def test_failed_start_of_a_request_keeps_the_engine_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(served: ServedModel) -> None:
        submit = served.llm.engine.submit
        monkeypatch.setattr(served.llm.engine, "submit", lambda request: 1 / 0)
        with pytest.raises(GenerationError, match="failed to start this request"):
            await served.open([request(served, 1)])
        monkeypatch.setattr(served.llm.engine, "submit", submit)
        assert served.engine.is_alive
        assert len(await tokens_of(await served.open([request(served, 1)]))) == 20

    with_served(check)


def test_cancelled_requests_free_their_resources() -> None:
    async def check(served: ServedModel) -> None:
        stay = asyncio.create_task(tokens_of(await served.open([request(served, 1, 60)])))
        leaving = [asyncio.create_task(tokens_of(await served.open([request(served, seed, 80)]))) for seed in (2, 3)]
        await asyncio.sleep(0.05)
        for task in leaving:
            task.cancel()
        kept = await stay
        assert kept == await tokens_of(await served.open([request(served, 1, 60)]))

    with_served(check)


def test_full_queue_and_invalid_requests_are_refused() -> None:
    async def check(served: ServedModel) -> None:
        room = served.llm.config.max_num_seqs + 1
        streams = [await served.open([request(served, seed)]) for seed in range(room)]
        with pytest.raises(BusyError):
            await served.open([request(served, 99)])
        for stream in streams:
            assert len(await tokens_of(stream)) == 20
        wrong = served.llm.request([10**6], SamplingParams())
        with pytest.raises(UsageError, match="outside"):
            await served.open([request(served, 1), wrong])
        assert len(await tokens_of(await served.open([request(served, 99)]))) == 20

    with_served(check, queue=1)


def test_deltas_of_a_step_are_delivered_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(served: ServedModel) -> None:
        calls: list[int] = []
        put_all = served.engine._put_all

        def counted(items: list[tuple[RequestStream, Delta]]) -> None:
            calls.append(len(items))
            put_all(items)

        served.engine._put_all = counted  # type: ignore[method-assign,assignment]
        forward, all_wait = served.llm.engine.runner.forward, threading.Event()
        monkeypatch.setattr(
            served.llm.engine.runner, "forward", lambda spans: all_wait.wait(support.PATIENCE) and forward(spans)
        )
        opening = [asyncio.create_task(served.open([request(served, seed)])) for seed in range(4)]
        await asyncio.sleep(0)  # lets all requests reach the engine
        all_wait.set()
        streams = await asyncio.gather(*opening)
        await asyncio.gather(*map(tokens_of, streams))
        assert max(calls) > 1
        assert len(calls) <= served.llm.engine.stats.passes

    with_served(check)


def test_head_is_changed_between_steps_and_an_invalid_head_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The head changes as after SIGHUP. Running requests continue with the same texts."""
    model = support.headed_model("llama")
    spec = HeadSpec(layer=model.config.head_layer)
    arrays = random_arrays(head_kind("mtp").shapes(spec, model.config.hidden_size), 9)
    good = support.write_head(tmp_path / "good", model.config, spec, arrays)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text('{"headstart_head": 1}')

    async def check(served: ServedModel) -> None:
        asked = [request(served, seed, tokens=60) for seed in (1, 2)]
        expected = [await tokens_of(await served.open([replace(each, depth=0)])) for each in asked]
        again = [replace(each, request_id=f"again {number}") for number, each in enumerate(asked)]
        streams = [await served.open([each]) for each in again]
        for path in (good, bad, tmp_path / "missing", good):
            served.change_head(str(path))
            await asyncio.sleep(0.05)
        assert [await tokens_of(each) for each in streams] == expected
        assert served.llm.info["head"] == str(good)
        assert served.engine.num_failed_steps == 0

    caplog.set_level(logging.INFO, "headstart.server")
    with_served(check, model=model)
    said = [each for each in caplog.messages if "drafting with" in each or "head was not changed" in each]
    assert [str(good) in each for each in said] == [True, False, False, True]
