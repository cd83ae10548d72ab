"""Draft vocabularies of heads that have none: the texts stay the same, measurements are kept, bad values are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support

from headstart import hub
from headstart.config import EngineConfig
from headstart.engine import vocabulary
from headstart.engine.load import Model
from headstart.errors import UsageError
from headstart.layers.sketch import directions


@pytest.fixture
def sketches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Vocabularies of any size are sketched, and the cheapest sketch will do."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    for name, value in {"FEWEST_TOKENS": 1, "CANDIDATES": ((8, 1),), "AGREES": 0.0, "WORTH": 1e9}.items():
        monkeypatch.setattr(vocabulary, name, value)
    return tmp_path


def texts(model: Model, **settings: Any) -> tuple[Any, Any]:
    engine = support.make(model, depth=3, **settings)
    outputs = [support.run(engine, support.varied_requests(temperature)) for temperature in (0.0, 0.9)]
    support.assert_clean(engine)
    return outputs, engine


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_texts_are_the_same_with_any_draft_vocabulary(sketches: Path, family: str) -> None:
    model = support.agreeing_model(family)
    full, engine = texts(model, draft_vocab="full")
    assert engine.drafting.num_vocab == model.config.vocab_size
    accepted = {"full": engine.stats.accepted}
    for wanted, size in (("auto", 32), (40, 40)):
        found, engine = texts(model, draft_vocab=wanted)
        for one, other in zip(found, full, strict=True):
            support.assert_same(one, other)
        assert engine.drafting.num_vocab == size
        accepted[str(wanted)] = engine.stats.accepted
    assert accepted["full"] > 0 < accepted["auto"]


def test_heads_with_an_lm_head_and_without_ids(sketches: Path) -> None:
    model = support.headed_model("qwen3", "eagle3")
    assert model.head and model.head.lm_head and model.head.draft_token_ids is None
    (plain, _), (found, engine) = texts(model, draft_vocab="full"), texts(model)
    for one, other in zip(found, plain, strict=True):
        support.assert_same(one, other)
    assert engine.drafting.num_vocab == 32


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_a_list_is_rows_of_the_lm_head(kind: str) -> None:
    """What is drafted is what a head with that draft vocabulary of its own drafts."""
    model = support.tiny_model("qwen3", num_hidden_layers=2)
    free = support.make_eagle3(model) if kind == "eagle3" else support.make_block(model)
    ids = vocabulary.listed(replace(model, head=free), 40).token_ids
    assert ids is not None
    if kind == "eagle3":
        spec = support.eagle3_spec(model, (0, 1))
        arrays = support.eagle3_arrays(model, spec)
        some = {**arrays, "lm_head.weight": arrays["lm_head.weight"][ids]}
        own = support.head_of(model, spec, some, ids.tolist())
    else:
        own = support.make_block(model, ids.tolist())
    pairs = ((own, "full"), (free, 40))
    found = [texts(replace(model, head=head), draft_vocab=wanted, drafter=kind) for head, wanted in pairs]
    for one, other in zip(found[0][0], found[1][0], strict=True):
        support.assert_same(one, other)
    engines = [engine for _, engine in found]
    assert [engine.drafting.num_vocab for engine in engines] == [40, 40]
    assert engines[0].stats.per_position == engines[1].stats.per_position


def test_who_drafts_all_tokens_says_so() -> None:
    cases = {"block": "its Markov head is one of all tokens", "draft_model": "a draft model drafts all tokens"}
    for kind, said in cases.items():
        with pytest.raises(UsageError, match=f"--draft-vocab is 40, but {said}"):
            support.make(support.headed_model("qwen3", kind), depth=3, draft_vocab=40)


def test_what_was_measured_is_kept(sketches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = support.agreeing_model("qwen3")
    support.make(model, depth=3)
    kept = [path.suffix for path in sorted((sketches / "sketches").iterdir())]
    assert kept == [".json", ".npy"]
    with monkeypatch.context() as patch:
        patch.setattr(vocabulary, "_states", None)  # nothing is written or measured again
        assert support.make(model, depth=3).drafting.num_vocab == 32
    next((sketches / "sketches").glob("*.npy")).write_bytes(b"damaged")
    assert support.make(model, depth=3).drafting.num_vocab == 32  # made again


@pytest.mark.parametrize("change", [{"AGREES": 1.1}, {"WORTH": 0.0}, {"FEWEST_TOKENS": 1 << 20}])
def test_the_full_vocabulary_where_a_sketch_does_not_pay(
    sketches: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, float]
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(vocabulary, name, value)
    model = support.agreeing_model("qwen3")
    for _ in range(2):
        assert support.make(model, depth=3).drafting.num_vocab == model.config.vocab_size


def test_a_cache_that_cannot_be_written(sketches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sketches / "file").write_text("")
    monkeypatch.setattr(hub, "record_path", lambda folder, facts: sketches / "file" / "x.json")
    model = support.agreeing_model("qwen3")
    assert support.make(model, depth=3).drafting.num_vocab in (32, model.config.vocab_size)


def test_bad_values_are_named() -> None:
    model = support.agreeing_model("qwen3")
    vocab = model.config.vocab_size
    with pytest.raises(UsageError, match=f"--draft-vocab is {vocab + 1}, but the model has {vocab} tokens"):
        support.make(model, depth=3, draft_vocab=vocab + 1)
    assert model.head
    own = replace(model, head=replace(model.head, draft_token_ids=np.arange(5)))
    with pytest.raises(UsageError, match="the head has a draft vocabulary of 5 tokens of its own"):
        support.make(own, depth=3, draft_vocab=4)
    for value in (0, -1, "some", 1.5):
        with pytest.raises(UsageError, match=f"--draft-vocab is {value!r}"):
            EngineConfig(draft_vocab=value)  # type: ignore[arg-type]


def test_directions_are_those_of_the_states() -> None:
    """States in few directions need as many dimensions, whatever else the rows hold."""
    rng = np.random.default_rng(0)
    few = rng.standard_normal((4, 48)).astype(np.float32)
    states = rng.standard_normal((500, 4)).astype(np.float32) @ few
    rows = rng.standard_normal((900, 48)).astype(np.float32)
    project, spread = directions(rows, states, 8)
    exact, guess = states @ rows.T, (states @ project.T) @ (rows @ spread.T).T
    assert (exact.argmax(1) == guess.argmax(1)).mean() > 0.95
