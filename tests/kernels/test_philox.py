"""Philox noise: known answers, accuracy, bounds, and equal bits in numpy and torch for any shape."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch

from headstart.kernels import philox

# Known answers of the Random123 distribution (kat_vectors, philox4x32 10): counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def parse_hex_words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
@pytest.mark.parametrize("array", [lambda x: np.array([x]), lambda x: torch.tensor([x])], ids=["numpy", "torch"])
def test_philox_known_answers(counter, key, result, array):
    words = philox.philox(tuple(map(array, parse_hex_words(counter))), tuple(map(array, parse_hex_words(key))))
    assert [int(word[0]) for word in words] == parse_hex_words(result)


def test_token_words_follow_the_counter_layout():
    ids = np.array([0, 1, 6, 7, 49151])
    words = philox.numpy_words(ids, seed=(5 << 32) | 9, position=77, choice=3, stream=philox.RESIDUAL)
    for token, word in zip(ids, words, strict=True):
        counter = [np.array([x]) for x in (token // 4, 77, 3, 2)]
        assert word == philox.philox(tuple(counter), (np.array([9]), np.array([5])))[token % 4][0]


def ulps(value: float, exact: Decimal) -> float:
    return float(abs(Decimal(value) - exact) / Decimal(np.spacing(abs(value))))


def test_log_is_accurate():
    rng = np.random.default_rng(0)
    x = np.concatenate(
        [
            rng.uniform(1e-9, 2, 300),
            np.exp(rng.uniform(-23, 4, 300)),
            1 - np.exp(rng.uniform(-23, -1, 300)),
            [2.0**-33, 1 - 2.0**-33, 1.0 + 2.0**-52, 1e-300, 1e300, 0.5, 2**0.5, 0.5**0.5],
        ]
    )
    got = philox.numpy_log(x)
    with localcontext() as context:
        context.prec = 50
        assert max(ulps(float(g), Decimal(float(v)).ln()) for g, v in zip(got, x, strict=True)) < 2
    assert philox.numpy_log(np.array([1.0]))[0] == 0


def test_gumbel_is_finite_monotone_and_bounded():
    noise = philox.gumbel(np.array([0, 1, 2, 1000, 2**31, 2**32 - 3, 2**32 - 2, 2**32 - 1]), np.int64, np.float64)
    assert np.isfinite(noise).all() and (np.diff(noise) < 0).all()
    assert philox.GUMBEL_MIN < noise[-1] < -3.1 and 22.8 < noise[0] < philox.GUMBEL_MAX


def test_gumbel_has_gumbel_moments():
    noise = philox.numpy_gumbel(np.arange(200_000), seed=1, position=2, choice=0, stream=0)
    assert abs(noise.mean() - 0.5772) < 0.01 and abs(noise.var() - np.pi**2 / 6) < 0.03


def test_numpy_and_torch_agree_bit_for_bit():
    words = np.random.default_rng(1).integers(0, 2**32, 10_007)
    expected = philox.gumbel(words, np.int64, np.float64)
    for count in (1, 3, 7, 10_007):
        got = philox.gumbel(torch.from_numpy(words[:count]), torch.int64, torch.float64)
        assert (got.numpy().view(np.int64) == expected[:count].view(np.int64)).all()
    assert (philox.gumbel(torch.from_numpy(words)[1::3], torch.int64, torch.float64).numpy() == expected[1::3]).all()
    assert (philox.gumbel(words[1::3], np.int64, np.float64) == expected[1::3]).all()
