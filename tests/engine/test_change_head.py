"""Changing the head of a running engine: texts and the prefix cache are kept, a failed change has no effect."""

import gc
import weakref
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import support

from headstart.config import AUTO, EngineConfig
from headstart.engine.build import change_head
from headstart.engine.engine import Engine
from headstart.engine.load import Model
from headstart.errors import HeadstartError, ModelError, UsageError

CONFIG: dict[str, Any] = {**support.SMALL, "dtype": "float64", "depth": 3}


def texts(engine: Engine, requests: list[Any], changes: dict[int, Model], config: EngineConfig) -> dict[Any, list[int]]:
    """Tokens by (request, choice); after step i the engine changes to the head of changes[i]."""
    steps = count(1)

    def after(engine: Engine) -> None:
        if (step := next(steps)) in changes:
            change_head(engine, changes[step], config)

    outputs = support.run(engine, requests, after)
    assert next(steps) > max(changes, default=0), "the run ended before the last change"
    return {key: output.tokens for key, output in outputs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [80, 16], ids=["room", "preempted"])
@pytest.mark.parametrize("depth", [3, AUTO])
def test_changing_heads_keeps_the_texts(depth: Any, blocks: int) -> None:
    first = support.agreeing_model("llama")
    second = replace(first, head=support.make_head(first, seed=5))
    settings = CONFIG | {"depth": depth, "kv_blocks": blocks}
    requests = support.varied_requests(0.8)
    plain = texts(support.make(first, **settings | {"depth": 0}), requests, {}, EngineConfig(**settings))
    engine = support.make(first, **settings)
    assert texts(engine, requests, {2: second, 4: first, 5: second, 7: first}, EngineConfig(**settings)) == plain


def test_new_head_reaches_its_own_acceptance() -> None:
    """A change in mid-text, and over a prefix cached with the old head, costs little acceptance."""
    good = support.agreeing_model("llama")
    bad = replace(good, head=support.make_head(good, seed=5))
    request = support.request(support.prompt_of(30, 1), max_tokens=60, stops=())
    config, alone, changed = EngineConfig(**CONFIG), support.make(good, **CONFIG), support.make(bad, **CONFIG)
    texts(alone, [request], {}, config)
    texts(changed, [request], {3: good}, config)
    assert changed.stats.accepted > 0.7 * alone.stats.accepted
    changed.reset_stats()
    texts(changed, [replace(request, request_id="again")], {}, config)
    assert changed.stats.accepted >= 0.95 * alone.stats.accepted


def test_replaced_head_is_freed() -> None:
    model = support.headed_model("llama")
    engine, config = support.make(model, **CONFIG), EngineConfig(**CONFIG)
    texts(engine, [support.request([3, 4, 5], max_tokens=9, stops=())], {}, config)
    before = weakref.ref(engine.runner.networks[0].network)
    change_head(engine, replace(model, head=support.make_head(model, seed=5)), config)
    gc.collect()
    assert before() is None


def test_mismatched_head_is_refused_without_effect() -> None:
    model = support.headed_model("llama")
    engine, request = support.make(model, **CONFIG), support.request([3, 4, 5], max_tokens=20, stops=())
    for head, error in ((support.make_eagle3(model), ModelError), (None, HeadstartError)):
        with pytest.raises(error):
            change_head(engine, replace(model, head=head), EngineConfig(**CONFIG))
    assert len(engine.runner.networks) == 1
    plain = texts(support.make(model, **CONFIG | {"depth": 0}), [request], {}, EngineConfig(**CONFIG))
    assert texts(engine, [request], {}, EngineConfig(**CONFIG)) == plain and engine.stats.drafts > 0


@pytest.mark.parametrize("settings", [{"drafter": "none"}, {"drafter": "ngram"}, {"depth": 0}])
def test_change_head_is_refused_if_no_head_drafts(settings: dict[str, Any]) -> None:
    model, settings = support.headed_model("llama"), CONFIG | settings
    with pytest.raises(UsageError, match="no head drafts here"):
        change_head(support.make(model, **settings), model, EngineConfig(**settings))


def test_draft_vocab_setting_applies_to_the_new_head() -> None:
    """A draft vocabulary in the new head's checkpoint overrides --draft-vocab N."""
    model = support.headed_model("llama")
    engine, config = support.make(model, **CONFIG, draft_vocab=40), EngineConfig(**CONFIG, draft_vocab=40)
    change_head(engine, replace(model, head=support.make_head(model, seed=5)), config)
    assert engine.drafting.num_vocab == 40
    change_head(engine, replace(model, head=support.make_head(model, draft_ids=range(20))), config)
    assert engine.drafting.num_vocab == 20
