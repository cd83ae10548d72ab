"""Early drafts: drafting starts after a pass before the host has read the sampled tokens, with the same drafts and
texts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import support
import torch
from test_cuda_recording import ReplayingGraphs, drafts_of, engine_of, model_of, recording_on

from headstart.config import AUTO
from headstart.engine.engine import Engine
from headstart.engine.runner import EarlyDrafts

pytestmark = pytest.mark.slow


@cache
def agreeing(backend: str = "cuda") -> Any:
    model = model_of(backend=backend)
    return replace(model, head=support.make_head(model, agreeing=True))


@contextmanager
def count_matches() -> Iterator[list[int]]:
    """A list with the number of early drafts that each call of `propose` uses."""
    counts, original_match = list[int](), EarlyDrafts.match

    def counting_match(early: EarlyDrafts, *args: Any) -> dict[int, int]:
        found = original_match(early, *args)
        counts.append(len(found))
        return found

    EarlyDrafts.match = counting_match
    try:
        yield counts
    finally:
        EarlyDrafts.match = original_match


def texts(engine: Engine, depth: int | None, count: int = 2, **fields: Any) -> list[list[int]]:
    about = {"max_tokens": 5, "temperature": 0.5, "depth": depth, **fields}
    requests = [support.request(support.prompt_of(7, i), name=str(i), **about) for i in range(count)]
    return [each.tokens for each in support.run(engine, requests).values()]


def test_early_drafts_equal_late_drafts() -> None:
    """Compared step by step on a device with graphs; of two sequences, the one with penalties waits for the host."""
    model, device_graphs = agreeing(), ReplayingGraphs()
    with count_matches() as counts, recording_on(model, device_graphs.device()):
        engine = engine_of(model)
        found = drafts_of(engine, 5)
    assert found == drafts_of(engine_of(agreeing("reference")), 5)
    assert sum(counts) >= 1 and engine.stats.accepted > 0 and device_graphs.replayed > 0


def test_early_drafts_keep_the_texts() -> None:
    """Covers auto depth, which scores drafts, and preempted sequences."""
    model, plain = agreeing(), engine_of(agreeing("reference"), drafter="none")
    wanted = texts(plain, 0)
    assert texts(engine_of(model, depth=AUTO), None, 1, max_tokens=4) == [wanted[0][:4]]
    engine = engine_of(model, kv_blocks=3, max_model_len=24)
    assert texts(engine, None) == wanted and engine.scheduler.num_preemptions > 0


def test_synthetic_acceptance_is_sent_to_the_device() -> None:
    """The number of accepted tokens does not depend on the samples, so the host sends it."""
    found = list[list[list[int]]]()
    for backend in ("reference", "cuda"):
        engine = engine_of(agreeing(backend), synthetic_acceptance="0.9,0.5")
        with count_matches() as counts:
            found.append(texts(engine, None, 1))
        assert bool(sum(counts)) == (backend == "cuda")
    assert found[0] == found[1] and engine.stats.accepted > 0


def test_all_work_of_a_step_is_launched_before_the_host_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    from headstart.kernels.cuda.device import HostCopy
    from headstart.kernels.cuda.recording import GraphRecorder

    log: list[str] = []
    read, compute = HostCopy.numpy, GraphRecorder.compute
    monkeypatch.setattr(HostCopy, "numpy", lambda self: (log.append("read"), read(self))[1])
    monkeypatch.setattr(GraphRecorder, "compute", lambda self, *args: (log.append("work"), compute(self, *args))[1])
    engine = engine_of(agreeing())
    engine.submit(support.request(support.prompt_of(12, 0), max_tokens=6, stops=()))
    steps = []
    while engine.has_work:
        log.clear()
        engine.step(lambda deltas: None)
        steps.append(list(log))
    first = steps[0]
    assert first.index("read") < len(first) - first[::-1].index("work"), "behind a prompt the host waits twice"
    assert all(step == sorted(step, reverse=True) and "work" in step for step in steps[1:]), steps


def test_device_verifies_drafts(cuda: Any) -> None:
    """Covers matching prefixes, dropped rows, a failed sample, and a sequence without verification."""
    from headstart.kernels.cuda import draft_loop
    from headstart.kernels.cuda.kernels import sampling

    drafted = [[4, 5, 6], [4, 5, 6], [7], [9, 9]]
    draws = [4, 5, 8, 0, 4, 5, 6, 3, -1, 0, 9, 1, 1]
    sent, padded = np.zeros((7, 5), np.int32), np.zeros((5, draft_loop.MAX_VERIFIED), np.int32)
    sent[sampling.NUM_DRAFTED], sent[sampling.FIXED_ACCEPTED] = [3, 3, 1, 2, -1], [-1, -1, -1, 2, -1]
    sent[sampling.FIRST_SAMPLE], sent[sampling.FIRST_ROW], sent[sampling.KNOWN_ROWS] = (
        [0, 4, 8, 10, 0],
        [0, 5, 9, 11, 14],
        [1, 0, 0, 0, 0],
    )
    sent[sampling.BASE_POSITION] = [20, 30, 40, 50, 60]
    for i, draft in enumerate(drafted):
        padded[i, : len(draft)] = draft
    put: Any = lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(cuda.torch_device)  # noqa: E731
    tokens, slots, visible_end = (
        put(each.astype(np.int32)) for each in (np.full(15, 99), np.arange(15), np.arange(15))
    )
    rows, ints, taken_ = put(np.full(5, 77, np.int32)), put(np.zeros((4, 5), np.int64)), put(np.full(5, -7, np.int32))
    sampling.verify[(5,)](
        put(sent), put(padded), put(np.array(draws, np.int64)), tokens, slots, visible_end, rows, ints, taken_, 5,
        MAX_VERIFIED=draft_loop.MAX_VERIFIED,
    )  # fmt: skip
    assert taken_.tolist() == [2, 3, 0, 2, 0] and ints[1].tolist() == [22, 33, 40, 52, 60]
    assert tokens.tolist() == [99, 4, 5, 8, 99, 4, 5, 6, 3, 0, 99, 9, 9, 1, 99] and rows.tolist() == [3, 8, 9, 13, 77]
    assert slots.tolist() == [0, 1, 2, 3, -1, 5, 6, 7, 8, 9, -1, 11, 12, 13, 14] == visible_end.tolist()
