"""The native sampler compared with the reference sampler: equal tokens, and equal bits of logprobs and
probabilities."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from headstart.core import NOT_FINITE, NOTHING_LEFT, SamplingRows

_native = pytest.importorskip("headstart.kernels.native._native")
from headstart.kernels.native import backend as native_sampling  # noqa: E402
from headstart.kernels.reference import sampling as reference_sampling  # noqa: E402

POOL = _native.ThreadPool(1)
MANY = _native.ThreadPool(3)
PATH = _native.paths()[0]
NAMES = {
    "temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "seed": np.uint64,
    "position": np.int64, "choice": np.int32, "repetition": np.float32, "presence": np.float32,
    "frequency": np.float32, "num_logprobs": np.int32,
}  # fmt: skip
PLAIN = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1, "position": 9, "choice": 0,
    "repetition": 1.0, "presence": 0.0, "frequency": 0.0, "num_logprobs": -1, "bias": {}, "penalty": {},
}  # fmt: skip


def rows_of(*settings, allowed=None):
    """SamplingRows of dictionaries; missing values are those of PLAIN."""
    full = [PLAIN | each for each in settings]
    columns = {name: np.array([each[name] for each in full], dtype) for name, dtype in NAMES.items()}
    for name, values, dtype in (("bias", "bias_values", np.float32), ("penalty", "penalty_counts", np.int32)):
        edits = [each[name] for each in full]
        columns[f"{name}_indptr"] = np.cumsum([0] + [len(edit) for edit in edits]).astype(np.int32)
        columns[f"{name}_ids"] = np.array([token for edit in edits for token in edit], np.int32)
        columns[values] = np.array([value for edit in edits for value in edit.values()], dtype)
    return SamplingRows(**columns, allowed=allowed)


def mask_of(rows, vocab_size, seed):
    return np.random.default_rng(seed).integers(0, 2**32, (rows, -(-vocab_size // 32)), np.uint32, endpoint=False)


def reference(logits, rows, vocab_size, token_ids=None, keep_probs=False):
    ids = None if token_ids is None else torch.from_numpy(token_ids)
    return reference_sampling.sample(torch.from_numpy(logits), rows, ids, vocab_size, keep_probs)


def assert_matches_reference(logits, rows, vocab_size=None, token_ids=None, keep_probs=True, pool=POOL):
    logits = np.ascontiguousarray(logits, np.float32)
    vocab_size = vocab_size or logits.shape[1]
    expected = reference(logits, rows, vocab_size, token_ids, keep_probs)
    settings = {"vocab_size": vocab_size, "token_ids": token_ids, "keep_probs": keep_probs}
    for path in _native.paths():
        got = native_sampling.sample(pool, path, logits, rows, **settings)
        assert_equal_samples(got, expected, keep_probs)
    return got


def assert_equal_samples(got, expected, keep_probs):
    assert got.tokens.dtype == np.int64 and got.tokens.tolist() == expected.tokens.tolist()
    assert list(got.logprobs) == list(expected.logprobs) and got.failures == expected.failures
    if keep_probs:
        np.testing.assert_array_equal(got.probs, expected.probs.numpy(), strict=True)


def settings_of(token):
    """Settings of any request; `token` is the strategy for token ids."""
    share = st.floats(0, 1, width=32, allow_subnormal=False)
    return st.fixed_dictionaries({
        "temperature": st.sampled_from([0.0, 9e-6, 1e-5, 2e-5, 0.3, 0.7, 1.0, 1.7, 30.0]),
        "top_k": st.sampled_from([0, 0, 1, 2, 3, 17, 64, 10**6]),
        "top_p": st.one_of(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.0]), share),
        "min_p": st.one_of(st.sampled_from([0.0, 0.0, 0.05, 1.0]), share),
        "seed": st.integers(0, 2**64 - 1),
        "position": st.integers(0, 2**33),
        "choice": st.integers(0, 127),
        "repetition": st.sampled_from([1.0, 1.3, 0.5]),
        "presence": st.sampled_from([0.0, 0.7, -2.0]),
        "frequency": st.sampled_from([0.0, 0.3, -0.4]),
        "num_logprobs": st.sampled_from([-1, -1, 0, 3, 20]),
        "bias": st.dictionaries(token, st.sampled_from([-math.inf, -100.0, 0.1, 5.0]), max_size=4),
        "penalty": st.dictionaries(token, st.integers(0, 3), max_size=5),
    })  # fmt: skip


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_small_vocabularies_match_reference(data):
    vocab_size = data.draw(st.sampled_from([1, 2, 13, 64, 65, 150]), "vocab")
    cases = data.draw(st.lists(settings_of(st.integers(0, vocab_size - 1)), min_size=1, max_size=4), "rows")
    ids = data.draw(st.none() | st.sets(st.integers(0, vocab_size - 1), min_size=1), "ids")
    token_ids = None if ids is None else np.array(sorted(ids), np.int64)
    width = vocab_size if ids is None else len(ids)
    rng = np.random.default_rng(data.draw(st.integers(0, 999), "logits"))
    step, scale = data.draw(st.sampled_from([(0, 1), (0, 8), (0.5, 2), (4, 40), (1, 0.01)]), "step, scale")
    logits = rng.normal(0, scale, (len(cases), width))
    if step:  # many ties
        logits = np.round(logits / step) * step
    if data.draw(st.booleans(), "holes"):
        logits[rng.random(logits.shape) < 0.2] = data.draw(st.sampled_from([-math.inf, -math.inf, math.nan, math.inf]))
    allowed = None
    if data.draw(st.booleans(), "mask"):
        allowed = mask_of(len(cases), vocab_size, data.draw(st.integers(0, 9)))
    if np.isnan(logits).any() or (logits == math.inf).any():  # a mask may hide it, but raw logprobs are undefined
        cases = [case | {"num_logprobs": -1} for case in cases]
    assert_matches_reference(logits, rows_of(*cases, allowed=allowed), vocab_size, token_ids)


VARIANTS = [
    {"temperature": 0.0, "num_logprobs": 20}, {}, {"temperature": 0.7}, {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 50, "num_logprobs": 0}, {"top_k": 3000, "temperature": 0.7}, {"top_k": 50, "top_p": 0.9},
    {"min_p": 0.02}, {"min_p": 0.001, "top_k": 40, "top_p": 0.95}, {"top_p": 0.999, "temperature": 1.3},
    {"bias": {5: -math.inf, 77: 4.0, 10**6: 1.0}}, {"temperature": 0.0, "bias": {5: 90.0}},
    {"penalty": {3: 0, 8: 2, 4999: 1}, "repetition": 1.2, "presence": 0.5, "frequency": 0.1, "top_p": 0.8},
]  # fmt: skip


@pytest.mark.parametrize("scale", [0.0, 0.2, 1.0, 3.0, 12.0])
@pytest.mark.parametrize("reduced", [False, True])
def test_large_vocabularies_match_reference(scale, reduced):
    rng, vocab_size = np.random.default_rng(int(scale * 10)), 5003
    token_ids = np.sort(rng.permutation(vocab_size)[:1777]).astype(np.int64) if reduced else None
    cases = [case | {"seed": int(rng.integers(2**63)), "position": i} for i, case in enumerate(VARIANTS)]
    logits = rng.normal(0, scale, (len(cases), 1777 if reduced else vocab_size + 61)).astype(np.float32)
    logits = logits if scale != 1.0 else np.round(logits * 4) / 4
    assert_matches_reference(logits, rows_of(*cases), vocab_size, token_ids)
    assert_matches_reference(
        logits, rows_of(*cases, allowed=mask_of(len(cases), vocab_size, 3)), vocab_size, token_ids, pool=MANY
    )


def test_many_samples_match_reference():
    """The noise of a few candidates decides each sample."""
    rng = np.random.default_rng(4)
    for vocab_size, params in ((64, {}), (1000, {"temperature": 0.8}), (1000, {"top_p": 0.7}), (200, {"top_k": 9})):
        logits = rng.normal(0, 2, (400, vocab_size)).astype(np.float32)
        cases = [params | {"seed": int(seed), "choice": i % 5} for i, seed in enumerate(rng.integers(0, 2**63, 400))]
        assert_matches_reference(logits, rows_of(*cases), keep_probs=False, pool=MANY)


def test_rows_are_independent_of_the_batch():
    logits = np.random.default_rng(8).normal(0, 3, (len(VARIANTS), 700)).astype(np.float32)
    together = native_sampling.sample(MANY, PATH, logits, rows_of(*VARIANTS), vocab_size=700, keep_probs=True)
    for i, case in enumerate(VARIANTS):
        alone = native_sampling.sample(POOL, PATH, logits[i : i + 1], rows_of(case), vocab_size=700, keep_probs=True)
        assert alone.tokens[0] == together.tokens[i] and alone.logprobs[0] == together.logprobs[i]
        assert (alone.probs[0] == together.probs[i]).all()


def test_rows_may_be_strided():
    wide = np.random.default_rng(2).normal(0, 2, (4, 640)).astype(np.float32)
    rows = rows_of({}, {"temperature": 0.0}, {"top_p": 0.5}, {"num_logprobs": 2})
    strided = native_sampling.sample(POOL, PATH, wide[:, :500], rows, vocab_size=500)
    contiguous = native_sampling.sample(POOL, PATH, wide[:, :500].copy(), rows, vocab_size=500)
    assert strided.tokens.tolist() == contiguous.tokens.tolist() and strided.logprobs == contiguous.logprobs
    with pytest.raises(ValueError, match="side by side"):
        native_sampling.sample(POOL, PATH, np.asfortranarray(wide), rows, vocab_size=640)


@pytest.mark.parametrize("num_top", [0, 3, np.array([0, 1, 2, 40, 500])])
def test_logprobs_match_reference(num_top):
    rng = np.random.default_rng(6)
    logits = np.round(rng.normal(0, 9, (5, 333)), 1).astype(np.float32)
    logits[3, ::3] = -math.inf
    tokens, counts = rng.integers(0, 333, 5), np.full(5, num_top)
    expected = reference_sampling.logprobs(torch.from_numpy(logits), tokens, counts)
    assert native_sampling.logprobs(MANY, PATH, logits, tokens, num_top) == expected
    with pytest.raises(IndexError):
        native_sampling.logprobs(POOL, PATH, logits, np.full(5, 333), num_top)
    logits[1, 7], logits[2, 8] = math.nan, math.inf
    for broken in (
        native_sampling.logprobs(POOL, PATH, logits, tokens, num_top),
        reference_sampling.logprobs(torch.from_numpy(logits), tokens, counts),
    ):
        assert [math.isnan(each.logprob) for each in broken] == [False, True, True, False, False]
        assert broken[1].top == broken[2].top == () and broken[0] == expected[0]


def test_failing_rows_are_reported():
    logits = np.zeros((3, 40), np.float32)
    banned = {"bias": dict.fromkeys(range(40), -math.inf)}
    for temperature in (0.0, 1.0):
        kind = {"temperature": temperature}
        assert assert_matches_reference(logits, rows_of(kind, banned | kind, kind)).failures == {1: NOTHING_LEFT}
        for value in (math.nan, math.inf):
            broken = logits.copy()
            broken[1, 39] = value
            rows = rows_of(kind, kind | {"num_logprobs": 1}, banned | kind | {"num_logprobs": 2})
            assert assert_matches_reference(broken, rows).failures == {1: NOT_FINITE, 2: NOTHING_LEFT}
            rows = rows_of(kind, kind | {"bias": {39: -math.inf}}, kind | {"num_logprobs": 2})
            assert assert_matches_reference(broken, rows).failures == {1: NOT_FINITE}
    nothing = np.zeros((3, 2), np.uint32)
    assert assert_matches_reference(logits, rows_of({}, {}, {}, allowed=nothing)).failures == dict.fromkeys(
        range(3), NOTHING_LEFT
    )


def test_invalid_shapes_are_refused():
    logits, rows = np.zeros((2, 40), np.float32), rows_of({}, {"bias": {1: 1.0}})
    for name in NAMES:
        with pytest.raises(ValueError, match=f"^({name}|.*length|.*fit)"):
            short = getattr(rows, name)[:1]
            if name == "num_logprobs":
                raise ValueError(name)  # used by Python only
            native_sampling.sample(POOL, PATH, logits, replace(rows, **{name: short}), vocab_size=40)
    wrong = [
        {"bias_indptr": np.array([0, 1, 9], np.int32)}, {"bias_indptr": np.array([1, 0, 1], np.int32)},
        {"bias_indptr": np.array([0, 1], np.int32)}, {"allowed": np.zeros((2, 1), np.uint32)},
        {"penalty_ids": np.zeros(3, np.int32)},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(ValueError):
            native_sampling.sample(POOL, PATH, logits, replace(rows, **change), vocab_size=40)
    for ids in (np.arange(39), np.arange(40) - 1, np.arange(40) + 1):
        with pytest.raises(ValueError):
            native_sampling.sample(POOL, PATH, logits, rows, vocab_size=40, token_ids=ids)


def test_empty_batch_gives_no_samples():
    rows = rows_of()
    assert {field.name for field in fields(rows)} >= set(NAMES)
    got = native_sampling.sample(POOL, PATH, np.zeros((0, 8), np.float32), rows, vocab_size=8)
    assert len(got.tokens) == 0 and list(got.logprobs) == []
