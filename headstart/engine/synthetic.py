"""Synthetic acceptance: drafts are accepted at given rates, whatever the model says, so that speed can be measured
where no head is right (random weights). What comes out is not the model's text.

Rates are those of vLLM's `synthetic_acceptance_rates` and llama.cpp's `--spec-synth-rates`: rates[i] is the share of
drafts whose first i + 1 tokens are all accepted.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from itertools import pairwise

import numpy as np

from headstart.core import Verdict
from headstart.kernels import philox

BLOCK = 256
"""Positions whose uniforms are drawn at a time: a call of the generator costs about as much for one."""


class SyntheticJudge:
    """Decides over drafts by noise of its own: a function of seed, choice and position, as that of tokens is."""

    def __init__(self, rates: Seq[float]) -> None:
        self.rates = tuple(rates)
        pairs = pairwise((1.0, *rates))
        self._chances = tuple(rate / before if before else 0.0 for before, rate in pairs)

    def judge(self, draft: Seq[int], targets: Seq[int], seed: int, choice: int, position: int) -> Verdict:
        """Accept token i of draft [k], if those before it are, with chance rates[i] / rates[i - 1], 0 behind the last
        rate; then the target's own token. position: absolute position of the first drafted token."""
        accepted = self.accepts(len(draft), seed, choice, position)
        return Verdict((*draft[:accepted], targets[accepted]), len(draft), accepted)

    def accepts(self, count: int, seed: int, choice: int, position: int) -> int:
        """How many of so many drafted tokens."""
        accepted = 0
        for place, chance in zip(range(position, position + count), self._chances, strict=False):
            if uniforms(seed, choice, place // BLOCK)[place % BLOCK] >= chance:
                break
            accepted += 1
        return accepted


@lru_cache(maxsize=1024)
def uniforms(seed: int, choice: int, block: int) -> list[float]:
    """Of the positions block * BLOCK up to the next block, in (0, 1)."""
    positions = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.int64)
    fixed = [np.array([word], np.int64) for word in (0, choice, philox.ACCEPT)]
    low, high = (np.array([word], np.int64) for word in philox.split_seed(seed))
    words = philox.philox((fixed[0], positions, fixed[1], fixed[2]), (low, high))
    drawn: list[float] = philox.uniform(words[0], np.float64).tolist()
    return drawn
