"""Drafting pauses while a head's drafts are rejected."""

import logging
from dataclasses import replace
from typing import Any

import pytest
import support

from headstart.api import LLM
from headstart.config import AUTO, FIXED_DEPTH, Depth, EngineConfig
from headstart.core import SamplingParams
from headstart.engine import drafting

CONFIG = EngineConfig(**{**support.SMALL, "backend": "reference", "dtype": "float64", "threads": 1})


def generate(llm: LLM, seed: int, **more: Any) -> None:
    params = SamplingParams(**{"max_tokens": 20, "seed": seed, "temperature": 1.0, "ignore_eos": True, **more})
    llm.generate([support.prompt_of(10, seed)], params)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [FIXED_DEPTH, AUTO])
def test_dead_head_is_paused_with_an_error_and_tried_again(
    depth: Depth, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head always drafts one token, which the model chooses as often as any other of 131."""
    # auto depth probes the head rarely; tiny steps need more probes
    monkeypatch.setattr(drafting, "DRAFTS_PER_CHECK", 20 if depth == AUTO else 100)
    monkeypatch.setattr("headstart.engine.depth.PROBES", 0.2)
    model = support.tiny_model("llama", num_hidden_layers=2)
    llm = LLM(replace(model, head=support.make_head(model, draft_ids=[3])), replace(CONFIG, depth=depth))
    engine, seed = llm.engine, 0
    with caplog.at_level(logging.ERROR):
        while engine.drafting.depth and seed < 3000:
            seed += 1
            generate(llm, seed)
        assert engine.head_health.is_paused
        before = engine.stats.drafts
        assert depth == AUTO or before >= drafting.DRAFTS_PER_CHECK
        generate(llm, 1)
        assert engine.stats.drafts == before
        engine.head_health.resume_at = 0.0
        generate(llm, 1)
        generate(llm, 1)
        assert not engine.head_health.is_paused and engine.drafting.depth == depth
        assert depth == AUTO or engine.stats.drafts > before
    assert caplog.text.count("THE HEAD IS DEAD") == 1
    support.assert_clean(engine)


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["ngram", "mtp", "mixed"])
@pytest.mark.parametrize("depth", [FIXED_DEPTH, AUTO])
def test_unpredictable_requests_do_not_pause_drafting(
    depth: Depth, drafter: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with logit bias, high temperature or banned and allowed tokens do not count against the head. Lookup
    drafters are never paused."""
    monkeypatch.setattr(drafting, "DRAFTS_PER_CHECK", 15)
    if drafter == "mixed" and depth != AUTO:
        pytest.skip("the head alone drafts")
    unpredictable: list[dict[str, Any]] = [{"logit_bias": {7: 100.0}}, {"temperature": 8.0}, {"bad_words": ["a"]}]
    unpredictable += [{"allowed_token_ids": [5, 6, 9]}] + [{}] * (drafter == "ngram")
    model = support.tiny_model("llama", num_hidden_layers=2)
    head = support.make_head(model, draft_ids=[3])
    llm = LLM(replace(model, head=head), replace(CONFIG, depth=depth, drafter=drafter))
    for seed in range(12):
        generate(llm, seed, **unpredictable[seed % len(unpredictable)])
    assert not llm.engine.head_health.is_paused and llm.engine.drafting.depth == depth
    if drafter != "ngram":
        assert llm.engine.ordinary_stats.drafts == 0
        assert llm.engine.drafting.auto.acceptance.first_token_rate("mtp")[0] == 0
    assert "DEAD" not in caplog.text
