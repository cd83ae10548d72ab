"""Powers, logarithms and exponentials with the same bits on every machine. Results of numpy and C libraries differ in
their last bits from processor to processor."""

from collections.abc import Callable
from decimal import Context, Decimal
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

_DIGITS = Context(prec=28, traps=[])  # double has 17; as in IEEE 754, nothing is trapped


def power(base: float, exponent: float) -> float:
    """base ** exponent, base > 0, rounded once."""
    return float(_DIGITS.power(Decimal(base), Decimal(exponent)))


def log(x: float) -> float:
    """Natural logarithm of x > 0, rounded once."""
    return float(_DIGITS.ln(Decimal(x)))


def exp(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """e^values."""
    return _each(_DIGITS.exp, values)


def logs(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Natural logarithms."""
    return _each(_DIGITS.ln, values)


def _each(function: Callable[[Decimal], Decimal], values: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # infinity, as in numpy
        found = np.array([float(function(Decimal(x))) for x in values.ravel().tolist()], np.float32)
    return found.reshape(values.shape)


@lru_cache
def geometric(base: float, width: int) -> tuple[float, ...]:
    """base ** (-i / width) for i = 0, 2, 4, ... below width: the frequencies of rotary embedding."""
    return tuple(power(base, -i / width) for i in range(0, width, 2))
