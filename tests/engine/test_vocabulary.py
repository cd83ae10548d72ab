"""Draft vocabularies for heads without one: texts stay the same, sketches are cached, invalid values are refused."""

import json
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
from headstart.layers.linear import sketch_directions


@pytest.fixture
def sketches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Enables sketches for any vocabulary size and accepts the cheapest one; gives the cache folder."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    for name, value in {"MIN_VOCAB": 1, "CANDIDATES": ((8, 1),), "MIN_AGREEMENT": 0.0, "MAX_TIME_SHARE": 1e9}.items():
        monkeypatch.setattr(vocabulary, name, value)
    return tmp_path


def texts(model: Model, **settings: Any) -> tuple[Any, Any]:
    engine = support.make(model, depth=3, **settings)
    outputs = support.run(engine, support.varied_requests(0.0))
    again = support.run(engine, support.varied_requests(0.9))
    return outputs | {(f"{name} hot", choice): output for (name, choice), output in again.items()}, engine


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_draft_vocabulary_keeps_the_texts(sketches: Path, family: str) -> None:
    model = support.agreeing_model(family)
    full, engine = texts(model, draft_vocab="full")
    assert engine.drafting.num_vocab == model.config.vocab_size
    accepted = {"full": engine.stats.accepted}
    for wanted, size in (("auto", 32), (40, 40)):
        found, engine = texts(model, draft_vocab=wanted)
        support.assert_same(found, full)
        assert engine.drafting.num_vocab == size
        accepted[str(wanted)] = engine.stats.accepted
    assert accepted["full"] > 0 < accepted["auto"]


@pytest.mark.slow
def test_head_with_its_own_lm_head_uses_a_sketch(sketches: Path) -> None:
    model = support.headed_model("qwen3", "eagle3")
    assert model.head and model.head.lm_head and model.head.draft_token_ids is None
    (plain, _), (found, engine) = texts(model, draft_vocab="full"), texts(model)
    support.assert_same(found, plain)
    assert engine.drafting.num_vocab == 32


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_reduced_vocabulary_selects_rows_of_the_lm_head(kind: str) -> None:
    """Drafts equal those of a head whose checkpoint has the same draft vocabulary."""
    model = support.tiny_model("qwen3", num_hidden_layers=2)
    unreduced = support.make_eagle3(model) if kind == "eagle3" else support.make_block(model)
    ids = vocabulary.reduced_vocabulary(replace(model, head=unreduced), 40).token_ids
    if kind == "eagle3":
        spec = support.eagle3_spec(model, (0, 1))
        arrays = support.eagle3_arrays(model, spec)
        own = support.head_of(model, spec, {**arrays, "lm_head.weight": arrays["lm_head.weight"][ids]}, ids.tolist())
    else:
        own = support.make_block(model, ids.tolist())
    pairs = ((own, "full"), (unreduced, 40))
    found = [texts(replace(model, head=head), draft_vocab=wanted, drafter=kind) for head, wanted in pairs]
    support.assert_same(found[0][0], found[1][0])
    engines = [engine for _, engine in found]
    assert [engine.drafting.num_vocab for engine in engines] == [40, 40]
    assert engines[0].stats.per_position == engines[1].stats.per_position


@pytest.mark.slow
@pytest.mark.parametrize("facts", [{}, {"causal": False, "anchor_predicts": False}, {"markov_rank": 8}], ids=str)
def test_block_drafter_uses_a_sketch(sketches: Path, facts: dict[str, Any]) -> None:
    model = support.tiny_model("qwen3", softness=0.1, num_hidden_layers=2)
    model = replace(model, head=support.make_block(model, **facts))
    (plain, _), (found, engine) = (texts(model, draft_vocab=each, drafter="block") for each in ("full", "auto"))
    support.assert_same(found, plain)
    assert engine.drafting.num_vocab == 32 and engine.stats.drafts > 0
    (document,) = (json.loads(path.read_text()) for path in (sketches / "sketches").glob("*.json"))
    assert document["of"]["rows"] == 5


@pytest.mark.parametrize("anchor_predicts", [True, False])
def test_sampled_states_of_blocks_equal_those_of_drafts(anchor_predicts: bool) -> None:
    """The LM head maps the states to the tokens that the drafter drafts after the same text."""
    model = support.tiny_model("qwen3", num_hidden_layers=2)
    model = replace(model, head=support.make_block(model, anchor_predicts=anchor_predicts))
    engine = support.make(model, depth=5, drafter="block", draft_vocab="full")
    drafter, drafts = engine.drafting.drafter, list[list[int]]()
    propose = drafter.propose

    def recording_propose(requests: Any) -> None:
        propose(requests)
        drafts.append(list(requests[0].sequence.draft.tokens))

    drafter.propose = recording_propose
    size = 5 if anchor_predicts else 6
    prompt = list(range(3, 3 + 2 * size))
    output = support.run(engine, [support.request(prompt, max_tokens=8, stops=(), temperature=0.0)])["r", 0]
    (handle,) = engine.runner.networks
    piece = [*prompt, output.tokens[0], *[7] * (size - 1)]
    states = vocabulary._states(engine, handle, [*range(40, 40 + 3 * size), *piece])
    assert len(states) == 10 and (states[-5:] @ model.decoder.lm_head.weight.T).argmax(-1).tolist() == drafts[0]
    assert vocabulary._states(engine, handle, prompt) is None
    support.assert_clean(engine)


def test_drafters_of_all_tokens_refuse_a_draft_vocabulary() -> None:
    cases = {"block": "its Markov head covers all tokens", "draft_model": "a draft model drafts all tokens"}
    for kind, reason in cases.items():
        with pytest.raises(UsageError, match=f"--draft-vocab is 40, but {reason}"):
            support.make(support.headed_model("qwen3", kind), depth=3, draft_vocab=40)


def test_sketch_is_stored_and_reused(sketches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = support.agreeing_model("qwen3")
    support.make(model, depth=3)
    assert [path.suffix for path in sorted((sketches / "sketches").iterdir())] == [".json", ".npy"]
    with monkeypatch.context() as patch:
        patch.setattr(vocabulary, "_states", None)  # no states are computed again
        assert support.make(model, depth=3).drafting.num_vocab == 32
    next((sketches / "sketches").glob("*.npy")).write_bytes(b"damaged")
    assert support.make(model, depth=3).drafting.num_vocab == 32  # replaced


@pytest.mark.parametrize("change", [{"MIN_AGREEMENT": 1.1}, {"MAX_TIME_SHARE": 0.0}, {"MIN_VOCAB": 1 << 20}])
def test_full_vocabulary_is_used_if_a_sketch_does_not_pay(
    sketches: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, float]
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(vocabulary, name, value)
    model = support.agreeing_model("qwen3")
    for _ in range(2):
        assert support.make(model, depth=3).drafting.num_vocab == model.config.vocab_size


def test_unwritable_cache_is_tolerated(sketches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sketches / "file").write_text("")
    monkeypatch.setattr(hub, "record_path", lambda folder, facts: sketches / "file" / "x.json")
    model = support.agreeing_model("qwen3")
    assert support.make(model, depth=3).drafting.num_vocab in (32, model.config.vocab_size)


def test_invalid_draft_vocab_is_refused() -> None:
    model = support.agreeing_model("qwen3")
    vocab = model.config.vocab_size
    with pytest.raises(UsageError, match=f"--draft-vocab is {vocab + 1}, but the model has {vocab} tokens"):
        support.make(model, depth=3, draft_vocab=vocab + 1)
    own = replace(model, head=replace(model.head, draft_token_ids=np.arange(5)))
    with pytest.raises(UsageError, match="the head has a draft vocabulary of 5 tokens of its own"):
        support.make(own, depth=3, draft_vocab=4)
    for value in (0, -1, "some", 1.5):
        with pytest.raises(UsageError, match=f"--draft-vocab is {value!r}"):
            EngineConfig(draft_vocab=value)


def test_sketch_directions_follow_the_states() -> None:
    """States in a subspace of 4 dimensions need 4 directions, whatever else the rows hold."""
    rng = np.random.default_rng(0)
    few = rng.standard_normal((4, 48)).astype(np.float32)
    states = rng.standard_normal((500, 4)).astype(np.float32) @ few
    rows = rng.standard_normal((900, 48)).astype(np.float32)
    project, spread = sketch_directions(rows, states, 8)
    exact, guess = states @ rows.T, (states @ project.T) @ (rows @ spread.T).T
    assert (exact.argmax(1) == guess.argmax(1)).mean() > 0.95
