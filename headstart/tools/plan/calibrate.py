"""Rates of a machine from a few measured passes: what a roofline needs to know, fitted and never tuned by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headstart.tools.plan.machine import Machine, Rates
from headstart.tools.plan.roofline import Pass, SizedModel, pass_seconds

Vector = NDArray[np.float64]

TRUSTED = 0.03
"""Relative error of a measured pass."""
SPREADS = {
    "bandwidth": 0.3, "cache_bandwidth": 0.5, "compute": 2.0, "attention": 2.0, "overlap": 0.3, "pass_s": 0.3,
}  # fmt: skip
"""How far, in log, the fit may move each rate from where it starts before that counts as much as one TRUSTED."""
START_OVERLAP = 4.0
START_PASS_S = 1e-4
STEPS = 60


@dataclass(frozen=True)
class Point:
    """A measured pass."""

    work: Pass
    seconds: float


def fit(points: Sequence[Point], model: SizedModel, machine: Machine, read_bandwidth: float) -> Rates:
    """The rates under which the roofline gives the measured times, by weighted least squares on logarithms.

    Two passes, of 1 and 8 rows, fix bandwidth and compute; passes at a second context fix the rate of attention. What
    the points leave open stays where it starts: the bandwidth a large sum reaches, a small fixed cost, an overlap
    exponent of START_OVERLAP. Raises ValueError for fewer than two points.
    """
    if len(points) < 2:
        raise ValueError("a fit needs at least two measured passes")
    names = list(SPREADS)
    start = np.log([read_bandwidth, read_bandwidth, *_start_rates(points, model), START_OVERLAP, START_PASS_S])
    spreads = np.array([SPREADS[name] for name in names])

    def residuals(logs: Vector) -> Vector:
        tried = replace(machine, rates=_rates(machine.rates, names, logs))
        errors = [np.log(pass_seconds(model, tried, point.work) / point.seconds) / TRUSTED for point in points]
        return np.array([*errors, *((logs - start) / spreads)])

    return _rates(machine.rates, names, _least_squares(residuals, start))


def _rates(rates: Rates, names: Sequence[str], logs: Vector) -> Rates:
    return replace(rates, **dict(zip(names, np.exp(logs).tolist(), strict=True)))


def _start_rates(points: Sequence[Point], model: SizedModel) -> tuple[float, float]:
    """Operations/s if the pass with most rows did nothing but multiply; attention a quarter of it."""
    most = max(points, key=lambda point: point.work.num_rows)
    shape = model.shape
    weights = sum(
        group.count * (group.attention.weights + group.mlp.weights + group.mlp.active * group.mlp.expert_weights)
        for group in shape.layers
    )
    compute = 2 * (weights * most.work.num_rows + shape.vocab * shape.hidden * most.work.num_logits) / most.seconds
    return compute, compute / 4


def _least_squares(residuals: Callable[[Vector], Vector], start: Vector) -> Vector:
    """Levenberg-Marquardt with a numerical Jacobian; steps that do not help are damped."""
    logs, damping = start.copy(), 1e-2
    current = residuals(logs)
    for _ in range(STEPS):
        jacobian = np.stack([(residuals(logs + step) - current) / 1e-4 for step in np.eye(len(logs)) * 1e-4], axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ current
        tried = logs - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        if not np.isfinite(tried).all() or np.abs(tried - start).max() > 20:
            damping *= 10
            continue
        proposed = residuals(tried)
        if proposed @ proposed < current @ current:
            logs, current, damping = tried, proposed, max(damping / 3, 1e-9)
        else:
            damping = min(damping * 4, 1e9)
    return logs


def line(one: tuple[int, float], other: tuple[int, float]) -> tuple[float, float]:
    """a and b of a + b * n through two points (n, seconds), neither below zero."""
    (n, first), (m, second) = one, other
    slope = max(0.0, (second - first) / (m - n))
    return max(0.0, first - slope * n), slope
