"""Hybrid models in the engine: prefix hits by snapshots, limited state slots, memory of states."""

from typing import Any
from weakref import WeakKeyDictionary

import pytest
from support import agreeing_model, headed_model, make, prompt_of, request, run

from headstart.config import MAX_DEPTH
from headstart.core import Request
from headstart.engine.build import MEMORY_SHARE
from headstart.engine.engine import Engine

FAMILY = "qwen3_5"
LONG: dict[str, Any] = {"max_model_len": 400, "kv_blocks": 300}


def engine_of(**settings: Any) -> Engine:
    return make(headed_model(FAMILY), **{"drafter": "mtp", "depth": 3, **LONG, **settings})


def greedy_request(prompt: list[int], name: str = "r", tokens: int = 12) -> Request:
    return request(prompt, name=name, max_tokens=tokens, stops=())


def answers(engine: Engine, *requests: Request) -> list[list[int]]:
    found = run(engine, requests)
    return [found[each.request_id, 0].tokens for each in requests]


def plain_answers(*requests: Request) -> list[list[int]]:
    return answers(engine_of(drafter="none", enable_prefix_caching=False, max_num_seqs=1), *requests)


@pytest.mark.parametrize("chunk", [64, 512])
def test_repeated_prompt_is_computed_from_the_last_snapshot(chunk: int) -> None:
    """300 tokens have snapshots after 256 and after 296, the last whole block before the last token."""
    prompt, engine = prompt_of(300, 1), engine_of(max_num_batched_tokens=chunk)
    first = answers(engine, greedy_request(prompt))
    assert engine.scheduler.prefix_hits == 0 and answers(engine, greedy_request(prompt)) == first == plain_answers(
        greedy_request(prompt)
    )
    assert engine.scheduler.prefix_hits == 296
    other = greedy_request([*prompt[:270], *prompt_of(20, 2)])
    assert answers(engine, other) == plain_answers(other) and engine.scheduler.prefix_hits == 296 + 256


def test_next_turn_reuses_the_last_prompt() -> None:
    prompt, engine = prompt_of(100, 3), engine_of()
    (reply,) = answers(engine, greedy_request(prompt))
    turn = greedy_request([*prompt, *reply, *prompt_of(30, 4)])
    assert answers(engine, turn) == plain_answers(turn) and engine.scheduler.prefix_hits == 96


def test_prefix_without_a_snapshot_is_computed() -> None:
    """Blocks of the 40 common tokens are cached, but the first snapshot is after 96."""
    prompt, engine = prompt_of(100, 5), engine_of()
    answers(engine, greedy_request(prompt))
    other = greedy_request([*prompt[:40], *prompt_of(10, 6)])
    assert answers(engine, other) == plain_answers(other) and engine.scheduler.prefix_hits == 0


@pytest.mark.parametrize("slots", [1, 2])
def test_sequences_wait_for_a_state_slot(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    specs, backend = headed_model(FAMILY).decoder.state_specs, headed_model(FAMILY).backend
    each = sum(backend.state_bytes(spec, MAX_DEPTH) for spec in specs)
    monkeypatch.setattr(type(backend), "free_memory", lambda self: int(each * slots * 4 / MEMORY_SHARE["cpu"]) + 64)
    monkeypatch.setattr("headstart.engine.build.PLANNED", WeakKeyDictionary())  # without engines of other tests
    engine, requests = engine_of(), [greedy_request(prompt_of(20 + i, i), f"r{i}") for i in range(5)]
    assert engine.memory.states.num_running == slots
    seen = set[int]()
    found = run(engine, requests, lambda running: seen.add(len(running.scheduler.running)))
    assert max(seen) == slots and [found[each.request_id, 0].tokens for each in requests] == plain_answers(*requests)


def test_preempted_sequence_restarts_from_its_snapshot() -> None:
    requests = [greedy_request(prompt_of(60, i), f"r{i}", 40) for i in range(3)]
    engine = engine_of(max_model_len=128, kv_blocks=32)
    assert answers(engine, *requests) == plain_answers(*requests) and engine.scheduler.num_preemptions > 0


def test_memory_is_split_between_states_and_kv(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running sequences and snapshots get a quarter of the budget each, KV the other half."""
    specs, backend = headed_model(FAMILY).decoder.state_specs, headed_model(FAMILY).backend
    state, kept = (sum(backend.state_bytes(spec, rows) for spec in specs) for rows in (0, MAX_DEPTH))
    monkeypatch.setattr(type(backend), "free_memory", lambda self: int(40 * kept / MEMORY_SHARE["cpu"]))
    for changes, running, snapshots in (
        ({"max_num_seqs": 8}, 8, 10 * kept // state),
        ({"max_num_seqs": 100}, 10, 10 * kept // state),
        ({"max_num_seqs": 8, "enable_prefix_caching": False}, 8, 0),
        ({"max_num_seqs": 8, "drafter": "none"}, 8, 10 * kept // state),
    ):
        monkeypatch.setattr("headstart.engine.build.PLANNED", WeakKeyDictionary())  # without engines of other tests
        states = engine_of(**changes).memory.states
        assert (states.num_running, states.num_slots - states.num_running) == (running, snapshots), changes
        assert states.num_kept == (0 if "drafter" in changes else MAX_DEPTH)


def test_accepted_drafts_are_replayed() -> None:
    """With accepted drafts there are fewer passes than tokens, and the text equals plain decoding."""
    model = agreeing_model(FAMILY)
    requests = [greedy_request(prompt_of(20, i), f"r{i}", 60) for i in range(3)]
    plain = make(model, drafter="none", enable_prefix_caching=False)
    engine = make(model, drafter="mtp", depth=4)
    assert answers(engine, *requests) == answers(plain, *requests)
    assert engine.runner.num_passes < 0.75 * plain.runner.num_passes
