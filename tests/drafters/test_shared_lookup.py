"""Shared lookup: drafts from the texts of earlier requests of the same owner, within a memory limit."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support import assert_same, headed_model, make, prompt_of, request, run, varied_requests

from headstart.config import EngineConfig
from headstart.core import Request
from headstart.drafters.ngram import MAX_SHARED_MATCH, PER_TOKEN, SHARED, SHORT, SharedLookup
from headstart.engine.costs import CostCurve, Costs
from headstart.engine.drafting import Drafting
from headstart.engine.engine import Engine
from headstart.errors import UsageError

ME, OTHER = 1, 2


def test_longest_and_then_latest_match_is_found() -> None:
    texts = SharedLookup()
    texts.add(ME, [], [1, 2, 3, 4, 5, 10, 11])
    texts.add(ME, [], [9, 2, 3, 4, 5, 20, 21])
    assert texts.find(ME, [7, 1, 2, 3, 4, 5], 4) == ([10, 11], 5) and texts.find(ME, [8, 2, 3, 4, 5], 1) == ([20], 4)
    assert texts.find(ME, [2, 3, 4, 5, 10, 11], 4) == ([], 0)  # no token follows the match
    assert texts.find(ME, [3, 4, 5], 4) == ([], 0)  # shorter than the minimum match


def test_match_extends_beyond_a_common_template() -> None:
    """All prompts end with the same tokens, like those of a chat template."""
    texts, template = SharedLookup(), [1, 2, 3, 4, 5]
    for question in range(100, 200):
        texts.add(ME, [question] * 20 + template, [question + 1000] * 3)
    for question in range(100, 200):
        found, size = texts.find(ME, [question] * 20 + template, 3)
        assert (found, size) == ([question + 1000] * 3, 25)


def test_texts_are_found_by_their_owner_only() -> None:
    texts = SharedLookup()
    texts.add(ME, [], list(range(10)))
    assert texts.find(OTHER, list(range(6)), 4) == ([], 0) and texts.find(ME, list(range(6)), 4) == ([6, 7, 8, 9], 6)
    texts.clear()
    assert texts.find(ME, list(range(6)), 4) == ([], 0)


def test_match_agrees_with_a_plain_search() -> None:
    """While the ring buffer wraps, every match is one that a plain search over the retained tokens finds, and no
    overwritten token is returned."""
    rng = np.random.default_rng(0)
    texts, kept = SharedLookup(400 * PER_TOKEN), list[list[int]]()
    for _ in range(60):
        text = rng.integers(0, 6, rng.integers(1, 60)).tolist()
        texts.add(ME, [], text)
        kept.append(text)
        tail = rng.integers(0, 6, 12).tolist()
        found, size = texts.find(ME, tail, 5)
        within: list[int] = []
        for old in reversed(kept):
            within = [-1, *old, *within]
        ring = within[-400:]
        places = [at for at in range(1, len(ring)) if size and ring[at - size : at] == tail[-size:] and ring[at] >= 0]
        assert not size or any(ring[at : at + len(found)] == found for at in places)
        assert size == 0 or SHORT <= size <= MAX_SHARED_MATCH
    assert texts.end > 3 * 400  # the ring wrapped


def test_memory_is_bounded() -> None:
    texts = SharedLookup(1000 * PER_TOKEN)
    texts.add(ME, [], list(range(5000)))  # longer than the ring
    texts.add(ME, [1, 2, 3, 4], [7, 8])
    assert texts.find(ME, [1, 2, 3, 4], 2) == ([7, 8], 4)
    assert texts.find(ME, list(range(4990, 4996)), 2) == ([4996, 4997], 6)
    assert texts.find(ME, list(range(100, 110)), 2) == ([], 0)


def with_new_ids(requests: list[Request], **changes: str) -> list[Request]:
    return [replace(each, request_id=f"{each.request_id} again", **changes) for each in requests]


def engine_of(drafter: str = "ngram", **settings: object) -> Engine:
    return make(headed_model("mimo"), **{"drafter": drafter, "depth": 5, "kv_blocks": 24, **settings})


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("drafter", "depth"), [("ngram", 5), ("mixed", "auto")])
def test_repeated_requests_are_drafted_and_keep_the_text(drafter: str, depth: int | str, temperature: float) -> None:
    requests = varied_requests(temperature)
    plain = run(make(headed_model("mimo"), drafter="none"), requests)
    engine = engine_of(drafter, depth=depth)
    for each in (requests, with_new_ids(requests), requests):
        outputs = run(engine, each)
        assert [output.tokens for output in outputs.values()] == [
            plain[name.removesuffix(" again"), choice].tokens for name, choice in outputs
        ]
    if drafter == "ngram":
        assert engine.stats.sources[SHARED] > 60


@pytest.mark.parametrize("changes", [{"owner": "key 1"}, {"cache_salt": "another"}])
def test_texts_of_other_owners_are_not_drafted(changes: dict[str, str]) -> None:
    requests = [request(prompt_of(30, 1), max_tokens=20, stops=())]
    engine = engine_of(enable_prefix_caching=False)
    run(engine, requests)
    run(engine, with_new_ids(requests, **changes))
    assert engine.stats.sources.get(SHARED, 0) == 0
    passes = engine.runner.num_passes
    run(engine, requests)
    assert engine.stats.sources[SHARED] > 10 and engine.runner.num_passes < passes + 12


@pytest.mark.parametrize("settings", [{"shared_lookup": False}, {"rule": "rejection"}])
def test_shared_lookup_is_disabled_by_flag_or_rejection(settings: dict[str, object]) -> None:
    """With rule `rejection` a text depends on its drafts, so drafts must not come from other requests."""
    requests = [request(prompt_of(30, 1), max_tokens=20, stops=())]
    engine = engine_of(**settings)
    run(engine, requests)
    run(engine, requests)
    assert engine.stats.sources.get(SHARED, 0) == 0


def test_corpus_is_drafted_from_and_keeps_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("learn", "_learn_draft"):  # keeps the costs set below
        monkeypatch.setattr(Drafting, name, lambda *args: None)
    requests = varied_requests(1.0)
    plain = run(make(headed_model("mimo"), drafter="none"), requests)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(" ".join(str(token) for output in plain.values() for token in output.tokens))
    tokenizer = SimpleNamespace(encode=lambda text: [int(word) for word in text.split()])
    model = replace(headed_model("mimo"), tokenizer=tokenizer)
    for settings in ({"drafter": "ngram"}, {"drafter": "mixed", "depth": "auto"}):
        engine = make(model, **{"depth": 5, "shared_lookup": False, "lookup_corpus": str(corpus), **settings})
        engine.drafting.auto.costs = Costs(CostCurve.fit({1: [1.0], 64: [1.1]}), CostCurve.fit({1: [0.5]}))
        assert_same(run(engine, requests), plain)
        assert engine.stats.sources[SHARED] > 20


def test_invalid_corpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"missing\.txt is not a file"):
        EngineConfig(lookup_corpus=str(tmp_path / "missing.txt"))
    corpus = tmp_path / "corpus.txt"
    corpus.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8 text"):
        engine_of(lookup_corpus=str(corpus))
    corpus.write_text("1 2 3")
    monkeypatch.setattr("headstart.engine.build.MAX_CORPUS", 2)
    model = replace(headed_model("mimo"), tokenizer=SimpleNamespace(encode=str.split))
    with pytest.raises(UsageError, match="has 3 tokens"):
        make(model, drafter="ngram", lookup_corpus=str(corpus))
