"""Verification of drafts by the rules `exact` and `rejection`."""

import itertools

import numpy as np
import pytest

from headstart.core import Draft, VerifyResult
from headstart.engine.verify import draw, verify_exact, verify_rejection
from headstart.kernels import philox

P = np.array([[0.5, 0.2, 0.05, 0.0, 0.25], [0.1, 0.1, 0.1, 0.6, 0.1]])
Q = np.array([[0.2, 0.3, 0.4, 0.1, 0.0], [0.1, 0.1, 0.1, 0.6, 0.1]])


@pytest.mark.parametrize(("draft", "targets", "tokens", "accepted"), [
    ([], [4], (4,), 0),
    ([4], [4, 9], (4, 9), 1),
    ([5], [4, 9], (4,), 0),
    ([1, 2, 3], [1, 7, 3, 8], (1, 7), 1),
    ([1, 2, 3], [1, 2, 3, 8], (1, 2, 3, 8), 3),
])  # fmt: skip
def test_verify_exact(draft, targets, tokens, accepted):
    assert verify_exact(draft, targets) == VerifyResult(tokens, len(draft), accepted)
    assert verify_exact(draft, np.array(targets)).tokens == tokens


def chi_square(counts, probs):
    expected = probs * counts.sum()
    assert (counts[probs == 0] == 0).all()
    return float((((counts - expected) ** 2)[probs > 0] / expected[probs > 0]).sum())


def first_tokens(q, runs=2500):
    """Counts of the first emitted token and its acceptance rate over seeds; the draft is drawn from q with separate
    noise."""
    counts, accepted = np.zeros(5), 0
    for seed in range(runs):
        token = draw(Q[0], seed + 10**9, 11, 0, philox.TOKEN) if q is not None else 1
        result = verify_rejection(Draft([token], q), P, seed, 0, 11)
        counts[result.tokens[0]] += 1
        accepted += result.num_accepted
    return counts, accepted / runs


@pytest.mark.slow
@pytest.mark.parametrize("q", [Q[:1], None], ids=["probs", "one-hot"])
def test_first_token_follows_the_target_distribution(q):
    counts, rate = first_tokens(q)
    assert chi_square(counts, P[0]) < 16.3  # 3 degrees of freedom: p = 0.001
    assert abs(rate - (np.minimum(P[0], Q[0]).sum() if q is not None else P[0][1])) < 0.03


@pytest.mark.slow
def test_bonus_token_follows_the_target_distribution():
    counts = np.zeros(5)
    for seed in range(1500):
        result = verify_rejection(Draft([0], P[:1]), P, seed, 0, 5)  # q = p: never rejected
        assert result.num_accepted == 1
        counts[result.tokens[1]] += 1
    assert chi_square(counts, P[1]) < 18.5


@pytest.mark.slow
def test_rejection_of_greedy_rows_equals_exact_match():
    rng = np.random.default_rng(0)
    for seed in range(200):
        targets, draft = rng.integers(0, 3, 4), rng.integers(0, 3, 3).tolist()
        expected = verify_exact(draft, targets)
        for probs in (None, np.eye(5)[draft]):
            assert verify_rejection(Draft(draft, probs), np.eye(5)[targets], seed, 0, 7) == expected
    assert verify_rejection(Draft(), P[:1], 3, 0, 9).tokens == (draw(P[0], 3, 9, 0, philox.TOKEN),)  # no draft


def test_noise_differs_by_position_choice_and_stream():
    weights = np.full(1000, 1e-3)
    places = itertools.product(range(4), range(4), (philox.TOKEN, philox.RESIDUAL))
    assert len({draw(weights, 1, position, choice, stream) for position, choice, stream in places}) > 20


def test_pruned_draw_equals_the_full_argmax():
    rng = np.random.default_rng(1)
    for seed in range(50):
        weights = np.exp(rng.normal(0, rng.uniform(0.1, 12), 300)) * (rng.random(300) < 0.7)
        scores = np.full(300, -np.inf)
        live = weights > 0
        scores[live] = philox.numpy_log(weights[live])
        scores += philox.numpy_gumbel(np.arange(300), seed, 3, 0, 2)
        assert draw(weights, seed, 3, 0, 2) == scores.argmax()


@pytest.mark.slow
def test_draft_noise_is_not_reused() -> None:
    """The drafter draws with the token noise of the request's seed. Recovered and bonus tokens must be independent of
    that noise."""
    q, p = np.array([0.5, 0.3, 0.1, 0.1]), np.array([0.1, 0.4, 0.25, 0.25])
    recovered, bonus = np.zeros(4), np.zeros((4, 4))
    for seed in range(2000):
        token = draw(q, seed, 11, 0, philox.TOKEN)
        first = verify_rejection(Draft([token], q[None]), np.stack([p, p]), seed, 0, 11)
        if not first.num_accepted:
            recovered[first.tokens[0]] += 1
        if seed < 800:
            bonus[verify_rejection(Draft([token], q[None]), np.stack([q, p]), seed, 0, 11).tokens] += 1
    rest = np.maximum(p - q, 0)
    assert chi_square(recovered, rest / rest.sum()) < 13.8  # 2 degrees of freedom: p = 0.001
    assert chi_square(bonus.ravel(), np.outer(q, p).ravel()) < 37.7  # 15 degrees of freedom: p = 0.001
