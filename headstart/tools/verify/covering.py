"""A small set of test cells in which every pair of levels of any two factors occurs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

Cell = dict[str, Any]
MAX_CANDIDATES = 4096

Pair = tuple[int, int, int, int]
"""Factor, level, other factor, level."""


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0, at_least: int = 0) -> list[Cell]:
    """Greedy covering array of strength 2: take the cell with most pairs not seen yet, until none is left. Fewer cells
    than `at_least` are filled up with random others, as long as there are any."""
    names = list(factors)
    levels = [range(len(factors[name])) for name in names]
    rng = np.random.default_rng(seed)
    missing = {(i, a, j, b) for i, j in combinations(range(len(names)), 2) for a, b in product(levels[i], levels[j])}
    cells: list[tuple[int, ...]] = [] if missing else list(product(*levels))
    while missing:
        best = max(_candidates(levels, rng, missing), key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        cells.append(best)
    cells += _others(levels, rng, cells, at_least - len(cells))
    return [{name: factors[name][level] for name, level in zip(names, row, strict=True)} for row in cells]


def _others(
    levels: list[range], rng: np.random.Generator, cells: Sequence[tuple[int, ...]], count: int
) -> list[tuple[int, ...]]:
    """Up to `count` random cells that are not among `cells`, all different."""
    others: dict[tuple[int, ...], None] = {}
    count = min(count, int(np.prod([len(each) for each in levels])) - len(cells))
    while len(others) < count:
        row = tuple(int(rng.integers(len(each))) for each in levels)
        if row not in cells:
            others[row] = None
    return list(others)


def _pairs(row: tuple[int, ...]) -> set[Pair]:
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def _candidates(levels: list[range], rng: np.random.Generator, missing: set[Pair]) -> list[tuple[int, ...]]:
    """All cells in random order, or random ones when there are too many; each random one covers a missing pair."""
    total = int(np.prod([len(each) for each in levels]))
    if total <= MAX_CANDIDATES:
        rows = list(product(*levels))
        return [rows[i] for i in rng.permutation(len(rows))]
    sample = [list(map(int, (rng.integers(len(each)) for each in levels))) for _ in range(256)]
    wanted = sorted(missing)
    for row in sample:
        i, a, j, b = wanted[rng.integers(len(wanted))]
        row[i], row[j] = a, b
    return [tuple(row) for row in sample]
