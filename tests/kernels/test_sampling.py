"""The reference sampler: order of processing against a plain Python oracle, ties, row independence, distribution,
coupling."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import currently_in_test_context, given, reject, settings, strategies as st

from headstart.core import NOT_FINITE, NOTHING_LEFT, Request, SamplingParams, Sequence
from headstart.engine.sampling import allowed_tokens, build_rows, update_counts
from headstart.kernels import philox
from headstart.kernels.reference import sampling as rs


def sequence(prompt=(0, 1), output=(), seed=0, choice=0, banned=(), **params):
    request = Request(
        request_id="r", prompt_ids=tuple(prompt), params=SamplingParams(**params), seed=seed, stop_ids=frozenset(),
        banned_until_min=frozenset(banned),
    )  # fmt: skip
    return Sequence(request, choice, list(prompt) + list(output), 0)


def entry(seq, prefix=()):
    return seq, len(seq.tokens) + len(prefix), list(prefix)


def run(logits, entries, token_ids=None, vocab_size=None, allowed=None, **options):
    logits = torch.as_tensor(np.array(logits))
    ids = None if token_ids is None else torch.as_tensor(token_ids)
    return rs.sample(logits, build_rows(entries, allowed=allowed), ids, vocab_size or logits.shape[-1], **options)


# A slow oracle in plain Python: dictionaries from target id to score, libm's exp and log.


def reject_unclear(clear):
    """Rejects an example whose result depends on the last bits of libm."""
    if currently_in_test_context() and not clear:
        reject()


def oracle(logits, ids, seq, prefix, allowed=None):
    params, request = seq.request.params, seq.request
    scores = {v: float(x) for v, x in zip(ids, logits, strict=True)}
    output = seq.tokens[seq.num_prompt :] + list(prefix)
    if allowed is not None:
        scores = {v: x for v, x in scores.items() if v in allowed}
    if len(output) < params.min_tokens:
        scores = {v: x for v, x in scores.items() if v not in request.banned_until_min}
    for v in scores:
        scores[v] += float(np.float32(params.logit_bias.get(v, 0.0)))
        repetition, presence, frequency = (
            float(np.float32(x)) for x in (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        )
        if v in output or v in request.prompt_ids:
            scores[v] = scores[v] / repetition if scores[v] > 0 else scores[v] * repetition
        scores[v] -= frequency * output.count(v) + presence * (v in output)
    best = max(scores.values())
    if params.temperature < 1e-5:
        return min(v for v in scores if scores[v] == best), None
    scores = {v: x / float(np.float32(params.temperature)) for v, x in scores.items()}
    order = sorted(scores, key=lambda v: (-scores[v], v))
    best = scores[order[0]]
    if params.min_p > 0:
        reject_unclear(all(abs(math.exp(scores[v] - best) - params.min_p) > 1e-6 for v in order))
        order = [v for v in order if math.exp(scores[v] - best) >= params.min_p]
    order = order[: params.top_k or None]
    if params.top_p < 1:
        order = nucleus(order, scores, best, float(np.float32(params.top_p)))
    weights = {v: math.exp(scores[v] - best) for v in order}
    noisy = sorted(((scores[v] + noise(v, seq, prefix), v) for v in order), reverse=True)
    reject_unclear(len(noisy) < 2 or noisy[0][0] - noisy[1][0] > 1e-9)
    return noisy[0][1], {v: w / sum(weights.values()) for v, w in weights.items()}


def nucleus(order, scores, best, top_p):
    total = sum(math.exp(scores[v] - best) for v in order)
    kept, running = [], 0.0
    for v in order:
        if kept and running >= top_p * total:
            break
        kept.append(v)
        running += math.exp(scores[v] - best)
        reject_unclear(abs(running / total - top_p) > 1e-6)
    return kept


def noise(token, seq, prefix):
    position = len(seq.tokens) + len(prefix)
    word = philox.numpy_words(np.array([token]), seq.request.seed, position, seq.choice, philox.TOKEN)[0]
    return -math.log(-math.log1p(-(float(word) + 0.5) * 2.0**-32))


V = 13
level = st.integers(-6, 6).map(lambda x: x / 2)  # many ties
tokens = st.lists(st.integers(0, V - 1), max_size=6)


@st.composite
def row_cases(draw):
    seq = sequence(
        [*draw(tokens), 0], draw(tokens), seed=draw(st.integers(0, 2**64 - 1)), choice=draw(st.integers(0, 3)),
        banned=draw(st.sets(st.integers(0, V - 1), max_size=2)), min_tokens=draw(st.sampled_from([0, 4])),
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])), top_k=draw(st.sampled_from([0, 1, 3, 12, 50])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5, 0.05, 0.0])), min_p=draw(st.sampled_from([0.0, 0.07, 0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5])), presence_penalty=draw(st.sampled_from([0.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, -0.4])),
        logit_bias=draw(st.dictionaries(st.integers(0, V - 1), st.sampled_from([-100.0, 0.5, 3.0]), max_size=3)),
    )  # fmt: skip
    logits = draw(st.lists(st.one_of(level, st.floats(-9, 9, width=32)), min_size=V, max_size=V))
    return seq, draw(st.lists(st.integers(0, V - 1), max_size=2)), np.array(logits, np.float32)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(row_cases(), min_size=1, max_size=4), st.data())
def test_samples_match_the_oracle(cases, data):
    reduced = data.draw(st.sampled_from([None, [0, 1, 4, 7, 9, 12]]))
    masks = data.draw(st.sampled_from([None, [0, 2, 3, 4, 7, 9, 10, 12]]))
    ids = list(range(V)) if reduced is None else reduced
    logits = np.stack([case[2][ids] for case in cases])
    allowed = None if masks is None else np.full((len(cases), 1), sum(1 << v for v in masks), np.uint32)
    entries = [entry(seq, prefix) for seq, prefix, _ in cases]
    got = run(logits, entries, reduced, V, allowed, keep_probs=True, prune=True)
    plain = run(logits, entries, reduced, V, allowed, prune=False)
    assert got.tokens.tolist() == plain.tokens.tolist()
    for i, (seq, prefix, _) in enumerate(cases):
        token, probs = oracle(logits[i], ids, seq, prefix, masks)
        assert got.tokens[i] == token
        expected = np.zeros(V)
        expected[list(probs or {token: 1.0})] = list(probs.values()) if probs else 1.0
        np.testing.assert_allclose(got.probs[i].numpy(), expected, atol=1e-6)


def mixed_rows(count, vocab_size, seed=0):
    rng, entries = np.random.default_rng(seed), []
    for i in range(count):
        params = {
            "temperature": (0.0, 1.0, 0.6)[i % 3], "top_k": (0, 40, 0, 5)[i % 4],
            "top_p": (1.0, 0.8, 1.0, 0.95, 1.0)[i % 5], "min_p": (0.0, 0.02)[i % 2],
            "repetition_penalty": (1.0, 1.2)[i // 2 % 2],
            "logit_bias": {} if i % 3 else {int(rng.integers(vocab_size)): 2.0},
            "logprobs": None if i % 4 else 3,
        }  # fmt: skip
        entries.append(entry(sequence(rng.integers(0, vocab_size, 9).tolist(), [3], seed=i, **params)))
    return rng.normal(0, 3, (count, vocab_size)).astype(np.float32), entries


@pytest.mark.parametrize("vocab_size", [37, 5003])
def test_rows_are_independent_of_the_batch(vocab_size):
    logits, entries = mixed_rows(13, vocab_size)
    together = run(logits, entries, keep_probs=True)
    for seed in range(4):
        picked = np.random.default_rng(seed).permutation(13)[: (1, 2, 7, 13)[seed]]
        part = run(logits[picked], [entries[i] for i in picked], keep_probs=True)
        assert part.tokens.tolist() == together.tokens[picked].tolist()
        assert torch.equal(part.probs, together.probs[picked])
        assert list(part.logprobs) == [together.logprobs[i] for i in picked]


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_pruned_equals_unpruned_on_a_large_vocabulary(threads):
    before = torch.get_num_threads()
    torch._C.set_num_threads(threads)
    try:
        rng = np.random.default_rng(3)
        for scale in (0.1, 2.0, 6.0):
            logits = rng.normal(0, scale, (6, 20_000)).astype(np.float32)
            entries = [entry(sequence(seed=s, temperature=1.0, top_p=(1.0, 0.9)[s % 2])) for s in range(6)]
            assert (run(logits, entries).tokens == run(logits, entries, prune=False).tokens).all()
            ids = np.sort(rng.permutation(20_000)[:7001])
            some = run(logits[:, ids], entries, ids, 20_000)
            assert (some.tokens == run(logits[:, ids], entries, ids, 20_000, prune=False).tokens).all()
    finally:
        torch._C.set_num_threads(before)


def test_logits_of_any_type_and_width_are_not_modified() -> None:
    logits, entries = mixed_rows(9, 200)
    assert (run(logits, entries).tokens == run(logits.astype(np.float64), entries).tokens).all()
    logits, entries = mixed_rows(9, 64)
    for dtype in (torch.float32, torch.float64):
        tensor = torch.from_numpy(logits).to(dtype)
        before = tensor.clone()
        rs.sample(tensor, build_rows(entries), None, 64, keep_probs=True)
        assert torch.equal(tensor, before)
    logits = np.array([[0.0, 1.0, 9.0, 9.0]], np.float32)
    assert run(logits, [entry(sequence())], vocab_size=2).tokens[0] == 1


def test_ties_go_to_the_lowest_id():
    flat = np.zeros((1, 5000), np.float32)
    assert run(flat, [entry(sequence(temperature=0.0))]).tokens[0] == 0
    assert run(flat + np.eye(1, 5000, 7) + np.eye(1, 5000, 4999), [entry(sequence())]).tokens[0] == 7
    for params, kept in (({"top_k": 3}, 3), ({"top_p": 0.25}, 1250), ({"top_p": 0.0}, 1), ({"min_p": 1.0}, 5000)):
        probs = run(flat, [entry(sequence(temperature=1.0, **params))], keep_probs=True).probs[0]
        assert probs.nonzero()[:, 0].tolist() == list(range(kept))
    probs = run([[0.0, 1.0, 1.0, 2.0, 1.0]], [entry(sequence(temperature=1.0, top_k=3))], keep_probs=True).probs[0]
    assert probs.nonzero()[:, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_failing_rows_do_not_affect_others(temperature):
    logits = np.random.default_rng(1).normal(0, 2, (4, 6)).astype(np.float32)
    fine = sequence(temperature=temperature, logprobs=2)
    banned = sequence(temperature=temperature, min_tokens=2, banned=range(6), logprobs=1)
    expected = run(logits, [entry(fine)] * 4, keep_probs=True)
    logits[1, 3] = math.nan
    got = run(logits, [entry(fine), entry(fine), entry(banned), entry(fine)], keep_probs=True)
    assert got.failures == {1: NOT_FINITE, 2: NOTHING_LEFT}
    assert got.tokens.tolist() == [expected.tokens[0], -1, -1, expected.tokens[3]]
    assert got.logprobs == [expected.logprobs[0], None, None, expected.logprobs[3]]
    assert (got.probs[[0, 3]] == expected.probs[[0, 3]]).all() and not got.probs[1:3].any()


# Distribution and coupling.

LOGITS = np.array([1.0, 0.2, -0.5, 0.9, -2.0, 0.0, 2.1, -1.0], np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("ids", [None, [0, 1, 4, 6, 7]], ids=["full", "reduced"])
@pytest.mark.parametrize("params", [{"temperature": 0.7}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8}])
def test_samples_follow_the_distribution(params, ids):
    count, seq = 20_000, sequence(**params)
    rows = build_rows([entry(seq)] * count)
    rows = replace(rows, seed=np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    logits = LOGITS if ids is None else LOGITS[ids]
    tensor = torch.from_numpy(logits)[None].expand(count, -1).contiguous()
    got = rs.sample(tensor, rows, None if ids is None else torch.tensor(ids), 8, keep_probs=True)
    _, weights = oracle(logits, ids or list(range(8)), seq, ())
    probs = np.zeros(8)
    probs[list(weights)] = list(weights.values())
    np.testing.assert_allclose(got.probs[0].numpy(), probs, atol=1e-6)
    counts = np.bincount(got.tokens, minlength=8)
    assert (counts[probs == 0] == 0).all()
    kept = probs > 0
    chi = (((counts - count * probs) ** 2)[kept] / (count * probs[kept])).sum()
    assert chi < 24.3  # 7 degrees of freedom: p = 0.001
    assert abs(counts / count - probs).sum() / 2 < 0.02


def test_coupled_drafting_is_always_accepted_on_equal_logits():
    """A drafter samples one token at a time, the target all rows at once; equal logits give equal tokens."""
    table = np.random.default_rng(5).normal(0, 2, (300, 50)).astype(np.float32)
    for seed in range(20):
        params = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
        seq = sequence([1, 2], [3], seed=seed, **params)
        draft: list[int] = []
        for i in range(4):
            draft.append(int(run(table[None, seed * 7 + i], [entry(seq, draft)]).tokens[0]))
        spans = [entry(seq, draft[:i]) for i in range(4)]
        assert run(table[seed * 7 : seed * 7 + 4], spans).tokens.tolist() == draft


# Logprobs and rows.


def test_logprobs_are_raw():
    logits = np.array([[0.0, 3.0, 3.0, -1.0, 2.0]], np.float32)
    found = run(logits, [entry(sequence(temperature=0.5, logit_bias={4: 50.0}, logprobs=3))]).logprobs[0]
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)[0].tolist()
    assert found.token == 4 and [token for token, _ in found.top] == [1, 2, 4]
    assert found.logprob == pytest.approx(expected[4], abs=1e-6)
    assert [value for _, value in found.top] == pytest.approx([expected[i] for i in (1, 2, 4)], abs=1e-6)
    assert run(logits, [entry(sequence(logprobs=0))]).logprobs[0].top == ()
    assert run(logits, [entry(sequence())]).logprobs == [None]


def counts_of(seq):
    found = update_counts(seq)
    return dict(zip(found.ids, found.counts, strict=True))


def test_build_rows_counts_incrementally():
    seq = sequence([1, 2, 2], [], repetition_penalty=1.1)
    assert counts_of(seq) == {1: 0, 2: 0}
    seq.tokens += [2, 5]
    rows = build_rows([entry(seq), entry(seq, [5, 6])])
    pairs = list(zip(rows.penalty_ids.tolist(), rows.penalty_counts.tolist(), strict=True))
    assert pairs[: rows.penalty_indptr[1]] == [(1, 0), (2, 1), (5, 1)]
    assert pairs[rows.penalty_indptr[1] :] == [(1, 0), (2, 1), (5, 2), (6, 1)]
    assert counts_of(seq) == {1: 0, 2: 1, 5: 1} and rows.position.tolist() == [5, 7]


def test_build_rows_bans_stop_tokens_until_min_tokens():
    seq = sequence([1], [4], min_tokens=3, banned=[9], logit_bias={9: 1.0, 3: -2.0})
    rows = build_rows([entry(seq, [0] * i) for i in range(3)])
    by_row = [
        dict(zip(rows.bias_ids[a:b].tolist(), rows.bias_values[a:b].tolist(), strict=True))
        for a, b in zip(rows.bias_indptr[:-1], rows.bias_indptr[1:], strict=True)
    ]
    assert by_row == [{9: -math.inf, 3: -2.0}] * 2 + [{9: 1.0, 3: -2.0}]


def test_plain_rows_have_no_bias_or_penalties():
    assert allowed_tokens([entry(sequence())] * 3, 40) is None
    rows = build_rows([entry(sequence(seed=2**64 - 1))], num_logprobs=-1)
    assert not len(rows.bias_ids) and not len(rows.penalty_ids) and rows.seed[0] == 2**64 - 1
    assert rows.num_logprobs.tolist() == [-1] and rows.bias_indptr.tolist() == [0, 0]


def test_rows_have_the_declared_types():
    def types(**params):
        return {name: a.dtype for name, a in vars(build_rows([entry(sequence(**params))] * 2)).items() if a is not None}

    plain = types()
    assert plain["seed"] == np.uint64 and plain["position"] == np.int64
    assert {name for name, dtype in plain.items() if dtype == np.float32} == {
        "temperature", "top_p", "min_p", "repetition", "presence", "frequency", "bias_values",
    }  # fmt: skip
    assert set(plain.values()) == {np.dtype(t) for t in (np.int32, np.float32, np.int64, np.uint64)}
    assert plain == types(logit_bias={3: 1.0}, repetition_penalty=1.1, top_k=2**40)


def test_cached_row_constants_follow_the_batch():
    """Constants of a batch are cached between steps; a batch with other sequences or another order gets its own."""
    sequences = [sequence(seed=i, choice=i, temperature=i / 4, top_k=i, logprobs=i or None) for i in range(4)]
    for order in ([0, 1], [1, 0], [2, 3], [0, 1], [3, 3]):
        for num_logprobs in (None, -1, 0):
            rows = build_rows([entry(sequences[i]) for i in order], num_logprobs=num_logprobs)
            assert rows.seed.tolist() == rows.choice.tolist() == rows.top_k.tolist() == order
            assert rows.temperature.tolist() == [i / 4 for i in order]
            assert rows.num_logprobs.tolist() == [(i or -1) if num_logprobs is None else num_logprobs for i in order]
