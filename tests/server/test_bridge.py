"""The engine behind the event loop: faults of a step, clients that leave, heads that are dead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import support

from headstart.api import LLM
from headstart.config import AUTO, FIXED_DEPTH, Depth, EngineConfig
from headstart.core import Delta, SamplingParams
from headstart.engine.load import Model
from headstart.errors import BusyError, GenerationError, UsageError
from headstart.heads.base import HeadSpec
from headstart.heads.kind import head_kind
from headstart.models.small import random_arrays
from headstart.server import watch
from headstart.server.bridge import Bridge, Stream
from headstart.server.watch import Watch

CONFIG = EngineConfig(**{**support.SMALL, "backend": "reference", "dtype": "float64", "threads": 1})


def with_bridge(
    check: Callable[[Bridge], Coroutine[Any, Any, None]],
    *,
    queue: int = 100,
    model: Model | None = None,
    depth: Depth = FIXED_DEPTH,
    drafter: str = "auto",
) -> None:
    llm = LLM(model or support.headed_model("llama"), replace(CONFIG, depth=depth, drafter=drafter))

    async def main() -> None:
        bridge = Bridge(llm, Watch(llm.engine, "tiny"), queue)
        bridge.start()
        try:
            async with asyncio.timeout(60):
                await check(bridge)
        finally:
            bridge.stop()

    asyncio.run(main())
    support.assert_clean(llm.engine)


async def tokens_of(stream: Stream) -> list[int]:
    try:
        return [token async for _, delta in stream for token in delta.tokens]
    finally:
        stream.close()


def request(bridge: Bridge, seed: int, tokens: int = 20, **more: Any) -> Any:
    params = SamplingParams(**{"max_tokens": tokens, "seed": seed, "temperature": 1.0, "ignore_eos": True, **more})
    return bridge.llm.request(support.prompt_of(10, seed), params)


def test_a_failing_step_fails_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(bridge: Bridge) -> None:
        expected = await tokens_of(await bridge.open([request(bridge, 1)]))
        runner, left = bridge.llm.engine.runner, []
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
                    await tokens_of(await bridge.open([request(bridge, 2)]))
                assert bridge.failures == number + 1
            assert await tokens_of(await bridge.open([request(bridge, 1)])) == expected
            assert bridge.failures == 0

    with_bridge(check)


def test_who_had_just_finished_in_a_failing_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(bridge: Bridge) -> None:
        engine = bridge.llm.engine
        commit_one = engine._commit_one

        def broken(span: Any, *rest: Any) -> Any:
            if span.sequence.request.seed == 2 and span.sequence.num_output > 3:
                raise MemoryError
            return commit_one(span, *rest)

        monkeypatch.setattr(engine, "_commit_one", broken)
        streams = [await bridge.open([request(bridge, seed, tokens)]) for seed, tokens in ((1, 8), (2, 40))]
        done = await asyncio.gather(*map(tokens_of, streams), return_exceptions=True)
        assert isinstance(done[1], GenerationError)
        assert isinstance(done[0], GenerationError) or len(done[0]) == 8
        monkeypatch.setattr(engine, "_commit_one", commit_one)
        assert len(await tokens_of(await bridge.open([request(bridge, 1)]))) == 20

    with_bridge(check)


def test_a_request_that_cannot_be_begun_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(bridge: Bridge) -> None:
        submit = bridge.llm.engine.submit
        monkeypatch.setattr(bridge.llm.engine, "submit", lambda request: 1 / 0)
        with pytest.raises(GenerationError, match="begin"):
            await bridge.open([request(bridge, 1)])
        monkeypatch.setattr(bridge.llm.engine, "submit", submit)
        assert bridge.alive
        assert len(await tokens_of(await bridge.open([request(bridge, 1)]))) == 20

    with_bridge(check)


def test_who_leaves_frees_everything() -> None:
    async def check(bridge: Bridge) -> None:
        stay = asyncio.create_task(tokens_of(await bridge.open([request(bridge, 1, 60)])))
        leaving = [asyncio.create_task(tokens_of(await bridge.open([request(bridge, seed, 80)]))) for seed in (2, 3)]
        await asyncio.sleep(0.05)
        for task in leaving:
            task.cancel()
        kept = await stay
        assert kept == await tokens_of(await bridge.open([request(bridge, 1, 60)]))

    with_bridge(check)


def test_a_full_queue_and_bad_requests_are_refused() -> None:
    async def check(bridge: Bridge) -> None:
        room = bridge.llm.config.max_num_seqs + 1
        streams = [await bridge.open([request(bridge, seed)]) for seed in range(room)]
        with pytest.raises(BusyError):
            await bridge.open([request(bridge, 99)])
        for stream in streams:
            assert len(await tokens_of(stream)) == 20
        wrong = bridge.llm.request([10**6], SamplingParams())
        with pytest.raises(UsageError, match="outside"):
            await bridge.open([request(bridge, 1), wrong])
        assert len(await tokens_of(await bridge.open([request(bridge, 99)]))) == 20

    with_bridge(check, queue=1)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [FIXED_DEPTH, AUTO])
def test_a_dead_head_is_switched_off_loudly_and_tried_again(
    depth: Depth, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It always drafts one token, which the model says as often as any other of 131."""
    # with auto it is asked now and then only: tiny steps leave no time for more
    monkeypatch.setattr(watch, "JUDGED_AFTER", 20 if depth == AUTO else 100)

    async def check(bridge: Bridge) -> None:
        engine, seed = bridge.llm.engine, 0
        while engine.drafting.depth and seed < 3000:
            seed += 1
            await tokens_of(await bridge.open([request(bridge, seed)]))
        assert bridge.watch.spec_disabled
        before = engine.stats.drafts
        assert depth == AUTO or before >= watch.JUDGED_AFTER
        await tokens_of(await bridge.open([request(bridge, 1)]))
        assert engine.stats.drafts == before
        bridge.watch._back_at = 0.0
        await tokens_of(await bridge.open([request(bridge, 1)]))
        assert not bridge.watch.spec_disabled
        assert engine.drafting.depth == depth
        assert depth == AUTO or engine.stats.drafts > before

    model = support.tiny_model("llama", num_hidden_layers=2)
    with caplog.at_level(logging.ERROR):
        with_bridge(check, model=replace(model, head=support.make_head(model, draft_ids=[3])), depth=depth)
    assert caplog.text.count("THE HEAD IS DEAD") == 1


@pytest.mark.parametrize("drafter", ["ngram", "mtp", "mixed"])
@pytest.mark.parametrize("depth", [FIXED_DEPTH, AUTO])
def test_nobody_can_switch_drafting_off_for_others(
    depth: Depth, drafter: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose texts no drafter can guess: random ids pushed one by one, hot, or with everything else banned. A
    lookup is never called dead, whatever it finds."""
    monkeypatch.setattr(watch, "JUDGED_AFTER", 15)
    if drafter == "mixed" and depth != AUTO:
        pytest.skip("the head alone drafts")
    hostile: list[dict[str, Any]] = [{"logit_bias": {7: 100.0}}, {"temperature": 8.0}, {"bad_words": ["a"]}]
    hostile += [{"allowed_token_ids": [5, 6, 9]}] + [{}] * (drafter == "ngram")

    async def check(bridge: Bridge) -> None:
        engine = bridge.llm.engine
        for seed in range(12):
            await tokens_of(await bridge.open([request(bridge, seed, **hostile[seed % len(hostile)])]))
        assert not bridge.watch.spec_disabled
        assert engine.drafting.depth == depth
        if drafter != "ngram":
            assert engine.judged.drafts == 0
            assert engine.drafting.auto.odds.seen("mtp")[0] == 0

    model = support.tiny_model("llama", num_hidden_layers=2)
    head = support.make_head(model, draft_ids=[3])
    with_bridge(check, model=replace(model, head=head), depth=depth, drafter=drafter)
    assert "DEAD" not in caplog.text


def test_deltas_of_a_step_come_in_one_call() -> None:
    async def check(bridge: Bridge) -> None:
        calls: list[int] = []
        hand_out = bridge._hand_out

        def counted(items: list[tuple[str, Delta]]) -> None:
            calls.append(len(items))
            hand_out(items)

        bridge._hand_out = counted  # type: ignore[method-assign,assignment]
        streams = [await bridge.open([request(bridge, seed)]) for seed in range(4)]
        await asyncio.gather(*map(tokens_of, streams))
        assert max(calls) > 1
        assert len(calls) <= bridge.llm.engine.stats.passes

    with_bridge(check)


def test_another_head_comes_between_steps_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What SIGHUP does: requests go on, their texts are the same."""
    model = support.headed_model("llama")
    spec = HeadSpec(layer=model.config.head_layer)
    arrays = random_arrays(head_kind("mtp").shapes(spec, model.config.hidden_size), 9)
    good = support.write_head(tmp_path / "good", model.config, spec, arrays)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text('{"headstart_head": 1}')

    async def check(bridge: Bridge) -> None:
        asked = [request(bridge, seed, tokens=60) for seed in (1, 2)]
        expected = [await tokens_of(await bridge.open([replace(each, depth=0)])) for each in asked]
        again = [replace(each, request_id=f"again {number}") for number, each in enumerate(asked)]
        streams = [await bridge.open([each]) for each in again]
        for path in (good, bad, tmp_path / "missing", good):
            bridge.change_head(str(path))
            await asyncio.sleep(0.05)
        assert [await tokens_of(each) for each in streams] == expected
        assert bridge.llm.info["head"] == str(good)
        assert bridge.failures == 0

    caplog.set_level(logging.INFO, "headstart.server")
    with_bridge(check, model=model)
    said = [each for each in caplog.messages if "drafting with" in each or "stays as it is" in each]
    assert [str(good) in each for each in said] == [True, False, False, True]
