"""Whole drafts in one call of the native module: tokens, scores and gates equal those of stepwise drafts bit for
bit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import support

pytest.importorskip("headstart.kernels.native._native")

from tiny_models import write_model

from headstart.config import AUTO, EngineConfig
from headstart.core import Draft, Sequence
from headstart.drafters.base import DraftRequest
from headstart.engine.depth import AutoDepth, AutoGate
from headstart.engine.engine import Engine
from headstart.engine.load import Model, load_model
from headstart.heads.base import Head, HeadSpec

DRAFT_IDS = tuple(range(1, support.VOCAB, 3))
MIXED: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8},
    {"temperature": 1.2, "top_p": 0.7, "top_k": 20},
    {"temperature": 0.7, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"temperature": 0.9, "min_p": 0.05, "logit_bias": {5: 2.0, 7: -3.0}},
    {"temperature": 0.9, "min_tokens": 6, "logit_bias": {4: 1.0}},
)
HEADS: dict[str, Callable[[Model], Head]] = {
    "mtp": support.make_head, "mtp, draft vocabulary": lambda model: support.make_head(model, draft_ids=DRAFT_IDS),
    "mtp, three modules": lambda model: support.make_head(
        model, HeadSpec(num_modules=3, beyond="cycle", recycle="pre_norm")),
    "eagle3": lambda model: support.make_eagle3(model, draft_ids=DRAFT_IDS),
    "dspark": lambda model: support.make_block(model, draft_ids=DRAFT_IDS, markov_rank=8, confidence=True),
    "dspark without confidence": lambda model: support.make_block(model, markov_rank=8),
    "confidence of the row": lambda model: support.make_block(
        model, markov_rank=4, confidence=True, confidence_markov=False),
    **{
        kind: partial(support.make_block, markov_rank=8, markov_kind=kind, confidence=True) for kind in ("gated", "rnn")
    },
    "dflash2": lambda model: support.make_block(
        model, markov_rank=8, markov_kind="selector", top_k=7, conv_taps=2, conv_group=16, causal=False),
    "dflash": lambda model: support.make_block(
        model, draft_ids=DRAFT_IDS, block_size=6, causal=False, anchor_predicts=False),
}  # fmt: skip


@cache
def native_model(threads: int) -> Model:
    config, arrays = support.family_of("mimo").tiny(num_hidden_layers=2, hidden_size=64, intermediate_size=96)
    path = write_model(support.new_folder(), config, arrays)
    return load_model(str(path), EngineConfig(backend="native", threads=threads))


@contextmanager
def step_by_step(engine: Engine) -> Iterator[None]:
    """Disables whole drafts of the backend."""
    runner: Any = engine.runner
    known, runner._draft_loop = runner._draft_loop, lambda steps: None
    try:
        yield
    finally:
        runner._draft_loop = known


def engine_of(head: str, threads: int = 2, **settings: Any) -> Engine:
    model = native_model(threads)
    built = HEADS[head](model)
    wanted = {"drafter": built.spec.kind, "depth": 5, "block_size": 16, **settings}
    return support.make(replace(model, head=built), **wanted)


def record(head: str, *, whole: bool, **settings: Any) -> list[Any]:
    """Every draft of every step of a batch of mixed requests."""
    engine, seen = engine_of(head, **settings), list[Any]()
    for i, fields in enumerate(MIXED):
        engine.submit(support.request(support.prompt_of(7 + 5 * i, i), name=str(i), seed=i, max_tokens=14, **fields))

    with nullcontext() if whole else step_by_step(engine):
        while engine.has_work:
            engine.step(lambda deltas: None)
            seen.append([(s.order, list(s.tokens), s.draft.tokens, s.draft.scores) for s in engine.scheduler.running])
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("head", HEADS)
def test_whole_drafts_equal_stepwise_drafts(head: str) -> None:
    ours, theirs = record(head, whole=True), record(head, whole=False)
    assert ours == theirs and any(len(draft) == 5 for step in ours for _, _, draft, _ in step)


def test_drafts_are_independent_of_threads() -> None:
    assert record("eagle3", whole=True, threads=1) == record("eagle3", whole=True, threads=2)


def test_whole_draft_is_one_call() -> None:
    engine = engine_of("mtp")
    (sequence,) = engine.submit(support.request(support.prompt_of(9, 1), name="a", seed=1, max_tokens=9))
    passes, run = list[str](), engine.runner.run
    engine.runner.run = lambda handle, program, *rest, **more: (
        passes.append(program),
        run(handle, program, *rest, **more),
    )[1]
    engine.step(lambda deltas: None)
    assert passes == ["forward"] and len(sequence.draft.tokens) == 5


@pytest.mark.parametrize("head", ["mtp", "dspark without confidence", "dflash"])
def test_gates_match_python(head: str) -> None:
    """Drafts and scores with auto depth are equal, for fixed costs and random acceptance records."""
    seen = []
    for whole in (True, False):
        engine = engine_of(head, depth=AUTO)
        auto, rng = engine.drafting.auto, np.random.default_rng(3)
        auto.token_s, auto.row_s, auto.draft_s = 1.0, 0.004, 0.001
        sequences = [
            engine.submit(support.request(support.prompt_of(6 + i, i), name=str(i), seed=i, temperature=0.9))[0]
            for i in range(4)
        ]
        for place in range(8):
            for _ in range(40):
                auto.acceptance.table(sequences[0], engine.drafting.method, place).learn(
                    float(rng.random() ** 6), bool(rng.random() < 0.6)
                )
        engine.drafting.depth = 0
        for _ in range(3):
            engine.step(lambda deltas: None)
        seen.append(list(drafts_of(engine, auto, sequences, whole=whole)))
    ours, theirs = seen
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    assert [scores for _, scores in ours] == [scores for _, scores in theirs]
    assert all(scores for tokens, scores in ours if tokens)
    assert head != "mtp" or len({len(tokens) for tokens, _ in ours}) > 1, "gates end drafts at different places"


def drafts_of(
    engine: Engine, auto: AutoDepth, sequences: list[Sequence], *, whole: bool
) -> Iterator[tuple[list[int], list[float]]]:
    for row_s in (0.0, 0.02, 0.1, 0.3):
        auto.row_s = row_s
        requests = [DraftRequest(sequence, 5, AutoGate(auto, sequence, should_start=True)) for sequence in sequences]
        for sequence in sequences:
            assert engine.memory.reserve(sequence, len(sequence.tokens) + 6)
            sequence.draft = Draft()
        with nullcontext() if whole else step_by_step(engine):
            engine.drafting.drafter.propose(requests)
        for sequence in sequences:
            yield sequence.draft.tokens, sequence.draft.scores
