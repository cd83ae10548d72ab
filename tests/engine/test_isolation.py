"""A failing sequence ends alone: the texts of other sequences do not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from functools import cache
from typing import Any

import numpy as np
import pytest
import support
from support import VOCAB, agreeing_model, assert_same, headed_model, make, prompt_of, request, run, varied_requests
from tiny_models import write_model

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import NOT_FINITE, NOTHING_LEFT, Mask, Request, SamplingParams, SamplingRows
from headstart.engine.engine import Engine
from headstart.engine.load import Model, load_model
from headstart.errors import GenerationError, status_of
from headstart.text.grammar import GrammarCompiler, GrammarSpec

FAMILY = "mimo"
BAD = request(prompt_of(9, 50), name="bad", seed=77, temperature=0.8, max_tokens=20, stops=(), logprobs=1)
GOOD_TOKENS = 6
"""Tokens that the bad request still gives."""


@cache
def native_model() -> Model:
    pytest.importorskip("headstart.kernels.native._native")
    config, arrays = support.family_of(FAMILY).tiny(num_hidden_layers=2, hidden_size=64, intermediate_size=96)
    return load_model(str(write_model(support.new_folder(), config, arrays)), EngineConfig(backend="native", threads=1))


MODELS: dict[str, Callable[[], Model]] = {"reference": lambda: agreeing_model(FAMILY), "native": native_model}
CASES = [
    ("reference", {"drafter": "none"}),
    ("reference", {"drafter": "mtp", "depth": 4}),
    ("reference", {"drafter": "ngram", "depth": 3, "max_num_batched_tokens": 20}),
    ("reference", {"drafter": "mtp", "depth": 4, "rule": "rejection"}),
    ("native", {"drafter": "none"}),
    ("native", {"drafter": "mtp", "depth": 4}),
]


def engine_of(backend: str, settings: dict[str, Any]) -> Engine:
    return make(MODELS[backend](), **{"backend": backend, "block_size": 16, **settings})


def other_requests() -> list[Request]:
    return varied_requests(0.8)[:5]


class NaNBackend:
    """A backend that returns NaN logits for one request from a given position on."""

    def __init__(self, engine: Engine, seed: int, position: int) -> None:
        self._backend, self._seed, self._position = engine.runner.backend, seed, position
        self.num_broken = 0
        engine.runner.backend = self

    def sample(self, logits: Any, rows: SamplingRows, **options: Any) -> Any:
        (broken,) = np.nonzero((rows.seed == self._seed) & (rows.position >= self._position))
        if broken.size:
            logits = logits * 1
            logits[broken] = np.nan
            self.num_broken += broken.size
        return self._backend.sample(logits, rows, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "settings"), CASES, ids=str)
def test_nan_logits_end_only_their_sequence(backend: str, settings: dict[str, Any]) -> None:
    alone = run(engine_of(backend, settings), other_requests())
    truth = run(engine_of(backend, {**settings, "drafter": "none"}), [BAD])["bad", 0]
    engine = engine_of(backend, settings)
    faulty_backend = NaNBackend(engine, BAD.seed, len(BAD.prompt_ids) + GOOD_TOKENS)
    outputs = run(engine, [*other_requests()[:2], BAD, *other_requests()[2:]])
    bad = outputs.pop(("bad", 0))
    assert_same(outputs, alone)
    assert faulty_backend.num_broken and (bad.finish_reason, bad.error) == ("error", NOT_FINITE)
    assert len(bad.tokens) == len(bad.logprobs) == GOOD_TOKENS and bad.stats is not None
    if "rule" not in settings:
        assert bad.tokens == truth.tokens[:GOOD_TOKENS] and bad.logprobs == truth.logprobs[:GOOD_TOKENS]


class ExhaustedConstraint:
    """A constraint that allows every token for `left` steps and then none."""

    done, accepting, error = False, False, ""

    def __init__(self, left: int) -> None:
        self._left = left

    def masks(self, draft: Seq[int], count: int | None = None) -> Mask:
        rows = np.zeros((len(draft) + 1, -(-VOCAB // 32)), np.uint32)
        rows[: self._left] = 0xFFFFFFFF
        return rows[-(count or len(rows)) :]

    def fitting(self, draft: Seq[int]) -> int:
        return min(len(draft), self._left)

    def forced(self, limit: int) -> list[int]:
        return []

    def advance(self, token: int) -> bool:
        self._left -= 1
        return self._left >= 0

    def rollback(self, count: int) -> None:
        self._left += count

    def copy(self) -> ExhaustedConstraint:
        return ExhaustedConstraint(self._left)


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "settings"), CASES, ids=str)
def test_constraint_without_allowed_tokens_ends_only_its_sequence(backend: str, settings: dict[str, Any]) -> None:
    alone = run(engine_of(backend, settings), other_requests())
    bad = [
        request(
            prompt_of(9, 50), name=f"bad {left}", seed=7, temperature=t, constraint=ExhaustedConstraint(left), stops=()
        )
        for left, t in ((0, 0.0), (1, 1.0), (GOOD_TOKENS, 1.0))
    ]
    outputs = run(engine_of(backend, settings), [bad[0], *other_requests(), *bad[1:]])
    for each, left in zip(bad, (0, 1, GOOD_TOKENS), strict=True):
        found = outputs.pop((each.request_id, 0))
        assert (found.finish_reason, found.error, len(found.tokens)) == ("error", NOTHING_LEFT, left)
    assert_same(outputs, alone)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["exact", "rejection"])
def test_nan_logits_of_the_head_end_only_the_draft(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"drafter": "mtp", "depth": 4, "rule": rule}
    whole = make(agreeing_model(FAMILY), **settings)
    expected = run(whole, other_requests())
    engine = make(agreeing_model(FAMILY), **settings)
    draw = engine.runner.draw

    def draw_with_nan(logits: Any, entries: Any, token_ids: Any = None, **more: Any) -> Any:
        broken = [row for row, (_, _, prefix) in enumerate(entries) if len(prefix) == 2]
        logits = logits.index_fill(0, logits.new_tensor(broken).long(), np.nan)
        return draw(logits, entries, token_ids, **more)

    monkeypatch.setattr(engine.runner, "draw", draw_with_nan)
    outputs = run(engine, other_requests())
    assert len(engine.stats.drafted_at) == 2 < len(whole.stats.drafted_at) and engine.stats.accepted > 10
    if rule == "exact":
        assert_same(outputs, expected)


def test_unwritten_slots_are_never_read() -> None:
    """Blocks left behind by a failed sequence may hold NaN."""
    engine = make(headed_model(FAMILY), drafter="mtp", depth=3)
    for handle in (engine.runner.trunk, *engine.runner.networks):
        for pool in handle.pools.kv:
            pool.keys.fill_(np.nan)
            pool.values.fill_(np.nan)
    engine.runner.trunk.pools.hidden.fill_(np.nan)
    assert_same(run(engine, other_requests()), run(make(headed_model(FAMILY), drafter="none"), other_requests()))
    assert engine.stats.drafted


def unspellable_grammar() -> tuple[LLM, GrammarSpec, dict[int, float]]:
    """A grammar with a character that the vocabulary cannot spell, and a logit bias that leads there."""
    llm = LLM(headed_model(FAMILY), EngineConfig(**{**support.SMALL, "dtype": "float64", "drafter": "mtp", "depth": 3}))
    (x,) = llm.tokenizer.encode("x")
    return llm, GrammarSpec("choice", ["x日", "the thing"]), {x: 100.0}


@pytest.mark.slow
def test_grammar_that_cannot_continue_ends_only_its_sequence() -> None:
    llm, spec, bias = unspellable_grammar()
    constraint = GrammarCompiler(llm.tokenizer, VOCAB).compile(spec)
    found: list[support.Outputs] = []
    for drafter in ("none", "mtp", "ngram"):
        bound = request([5, 6], name="bad", constraint=constraint, logit_bias=bias)
        found.append(run(make(headed_model(FAMILY), drafter=drafter), [bound, *other_requests()]))
        assert_same(found[-1], found[0])
    bad = found[0]["bad", 0]
    assert (bad.tokens, bad.finish_reason) == (list(bias), "error") and "no text of this vocabulary" in bad.error


def test_api_raises_generation_error() -> None:
    llm, spec, bias = unspellable_grammar()
    with pytest.raises(GenerationError, match="broke off after 1 token: no text of this vocabulary") as caught:
        llm.generate(["a"], SamplingParams(logit_bias=bias), constraint=spec)
    assert (status_of(caught.value).exit_code, status_of(caught.value).http) == (2, 400)
    pieces = llm.stream("a", SamplingParams(logit_bias=bias), constraint=spec)
    assert next(pieces).text == "x"
    with pytest.raises(GenerationError):
        next(pieces)
    support.assert_clean(llm.engine)
    away = SamplingParams(logit_bias=dict.fromkeys(bias, -100.0))
    assert llm.generate(["a"], away, constraint=spec)[0].text == "the thing"
