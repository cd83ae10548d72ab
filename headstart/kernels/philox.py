"""Noise of coupled sampling: Philox4x32-10 and an exact log, for numpy arrays and torch tensors.

Only elementwise integer and float64 operations with exact IEEE 754 rounding are used (+ - * /, shifts, bit views), so
the bits do not depend on library, device, shape or vectorization. libm's log has no such guarantee.

Key: a request's 64-bit seed. Counter: (token id // 4, position, choice, stream); token id % 4 picks the word.
Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from typing import Any

import numpy as np

Array = Any  # numpy array or torch tensor with at least one dimension (numpy warns when a scalar overflows)
Words = tuple[Array, Array, Array, Array]

TOKEN, ACCEPT, RESIDUAL = 0, 1, 2  # noise streams: the token; accept test and residual sample of the rule `rejection`

GUMBEL_MIN, GUMBEL_MAX = -3.14, 22.88
"""Bounds of `gumbel`, rounded outwards from -3.1301.. (word 2^32 - 1) and 22.8738.. (word 0)."""

_MASK = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox(counter: Words, key: tuple[Array, Array]) -> Words:
    """The four words of Philox4x32-10. All arrays are int64 with 32-bit values, and broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # The low halves in c1, c3 are masked after the next xor, or at the end.
        p0, p1 = c0 * _MULTIPLY[0], c2 * _MULTIPLY[1]
        c0, c1, c2, c3 = _mix(p1, c1, k0), p1, _mix(p0, c3, k1), p0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def _mix(product: Array, word: Array, key: Array) -> Array:
    """(product >> 32) ^ word ^ key."""
    high, mixed = product >> 32, word ^ key
    if high.shape == mixed.shape:
        mixed ^= high
    else:
        mixed = mixed ^ high
    mixed &= _MASK
    return mixed


_LN2_HIGH = 0x2C5C85FDF47 * 2.0**-42  # 42 bits, so that k * _LN2_HIGH is exact
_LN2_LOW = 5.497923018708371e-14
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
_ATANH = tuple(2.0 / (2 * n + 1) for n in range(10, 0, -1))  # 2/21, ..., 2/3
_TWO52 = 2.0**52
_TWO52_BITS = 0x4330000000000000
_SIGNED = 1.5 * 2.0**52
_SIGNED_BITS = 0x4338000000000000


def log(x: Array, int64: Any, float64: Any) -> Array:
    """Natural logarithm of positive normal float64 numbers, accurate to about one ulp.

    x = 2^k m with m in [sqrt(1/2), sqrt(2)); f = m - 1, s = f / (2 + f); log m = 2 atanh s = 2s + s^3 (2/3 + 2/5 s^2
    + ...). As 2s = f - s f, log m = f - s (f - s^2 (2/3 + ...)), whose leading term f is exact. `int64`, `float64`:
    the library's dtypes, for bit views.
    """
    bits = x.view(int64)
    exponent = (bits - _SQRT_HALF_BITS) >> 52
    f = (bits - (exponent << 52)).view(float64) - 1.0
    s = f / (f + 2.0)
    z = s * s
    series = z * _ATANH[0]
    for coefficient in _ATANH[1:]:
        series = (series + coefficient) * z
    # int64 -> float64 by adding to the bits of a large float: exact, and the same in both libraries.
    k = (exponent + _SIGNED_BITS).view(float64) - _SIGNED
    return k * _LN2_HIGH + (k * _LN2_LOW + (f - s * (f - series)))


def uniform(words: Array, float64: Any) -> Array:
    """v = (word + 0.5) * 2^-32 in (0, 1), exact in float64."""
    return ((words | _TWO52_BITS).view(float64) - _TWO52 + 0.5) * 2.0**-32


def gumbel(words: Array, int64: Any, float64: Any) -> Array:
    """g = -log(-log1p(-v)), v = (word + 0.5) * 2^-32; never infinite. 1 - v is exact, so log1p(-v) is log(1 - v)."""
    rest = uniform(_MASK - words, float64)
    return -log(-log(rest, int64, float64), int64, float64)


def split_seed(seed: int) -> tuple[int, int]:
    """(low, high) words of a 64-bit seed: the Philox key."""
    return seed & _MASK, (seed >> 32) & _MASK


def numpy_words(token_ids: np.ndarray[Any, Any], seed: int, position: int, choice: int, stream: int) -> Array:
    """The noise words int64 [N] of token ids [N], for one sampled token."""
    ids = np.asarray(token_ids, np.int64)
    fixed = [np.array([word], np.int64) for word in (position & _MASK, choice & _MASK, stream)]
    low, high = (np.array([word], np.int64) for word in split_seed(seed))
    words = philox((ids >> 2, fixed[0], fixed[1], fixed[2]), (low, high))
    return np.choose(ids & 3, np.broadcast_arrays(*words))


def numpy_gumbel(token_ids: np.ndarray[Any, Any], seed: int, position: int, choice: int, stream: int) -> Array:
    """Gumbel noise float64 [N] of token ids [N]."""
    return gumbel(numpy_words(token_ids, seed, position, choice, stream), np.int64, np.float64)


def numpy_log(x: np.ndarray[Any, Any]) -> Array:
    """`log` of a numpy float64 array."""
    return log(x, np.int64, np.float64)
