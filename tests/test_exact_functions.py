"""headstart.exact: powers, logarithms and exponentials equal numpy's and have fixed bits."""

import math

import numpy as np
import pytest

from headstart import exact


@pytest.mark.parametrize(("base", "width"), [(1e4, 64), (1e6, 128), (5e5, 127), (150000.0, 256)])
def test_geometric_equals_numpys_powers(base: float, width: int) -> None:
    expected = base ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    np.testing.assert_array_max_ulp(np.array(exact.geometric(base, width)), expected, maxulp=1)


def test_log_and_exp_equal_numpys() -> None:
    for x in (1e-300, 0.5, math.e, 32.0, 1e300):
        assert math.isclose(exact.log(x), math.log(x), rel_tol=3e-16)
    values = np.linspace(-20, 20, 401, dtype=np.float32).reshape(1, 401)
    found = exact.exp(values)
    assert found.dtype == np.float32
    assert np.array_equal(found, np.exp(values.astype(np.float64)).astype(np.float32))
    assert np.array_equal(exact.logs(found), np.log(found.astype(np.float64)).astype(np.float32))
    assert exact.exp(np.array([100, -200, np.inf, -np.inf], np.float32)).tolist() == [np.inf, 0, np.inf, 0]
    assert math.isnan(exact.exp(np.array([np.nan], np.float32))[0])


def test_bits_of_geometric_are_fixed() -> None:
    assert [each.hex() for each in exact.geometric(10000.0, 6)] == [
        "0x1.0000000000000p+0", "0x1.7c3d2c4d63ff6p-5", "0x1.1a62d511f2b54p-9",
    ]  # fmt: skip
