"""Verification of drafts: how many drafted tokens are accepted, and the token after them. numpy only.

`verify_exact` compares with the target's own sampled tokens (coupled sampling: Daliri, Musco, Suresh, "Coupling without
communication"): the text does not depend on drafts. `verify_rejection` follows Leviathan et al. (2211.17192) and Chen
et al. (2302.01318): the same distribution, not the same text. `SyntheticVerifier` accepts drafts at given rates, to
measure speed where no head is right (random weights); its output is not the model's text.
"""

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.core import Draft, Float64, TokenLogprob, VerifyResult
from headstart.kernels import philox


def verify_exact(draft: Seq[int], targets: Seq[int], logprobs: Seq[TokenLogprob | None] = ()) -> VerifyResult:
    """Accepts the longest prefix of draft [k] that equals targets [k + 1], then adds the target's next token (-1 if its
    row failed). `logprobs` belong to the targets."""
    accepted = 0
    while accepted < len(draft) and draft[accepted] == targets[accepted]:
        accepted += 1
    end = accepted + 1
    return VerifyResult(tuple(targets[:end]), len(draft), accepted, tuple(logprobs[:end]))


def verify_leaves(draft: Draft, targets: Seq[int], logprobs: Seq[TokenLogprob | None] = ()) -> VerifyResult:
    """As `verify_exact`; a leaf that equals the token in the chain's place is accepted, and the target's token after it
    is added. targets: [1 + draft.num_rows], in the order of `Draft.prefixes`."""
    result, first = verify_exact(draft.tokens, targets, logprobs), len(draft.tokens) + 1
    if not draft.leaves:
        return result
    place, token = result.num_accepted, result.tokens[-1]
    for index, leaf in enumerate(draft.leaves):
        if leaf.place == place and leaf.token == token:
            row = first + index
            added = tuple(logprobs[row : row + 1])
            return VerifyResult(
                (*result.tokens, targets[row]), draft.num_rows, place + 1, result.logprobs + added, leaf=index
            )
    return replace(result, num_drafted=draft.num_rows)


def verify_rejection(draft: Draft, target_probs: Any, seed: int, choice: int, position: int) -> VerifyResult:
    """Accepts d_i with probability min(1, p(d_i) / q(d_i)); the first rejected token is redrawn from max(p - q, 0).

    target_probs: [k + 1, V] processed target distributions. draft.probs: [k, V], or None for a one-hot draft (q = 1).
    position: absolute position of the first drafted token. Each position has its own uniform number and noise. A row of
    zeros (a failed row) rejects, and gives the token -1.
    """
    target = np.asarray(target_probs, np.float64)
    drafted = None if draft.probs is None else np.asarray(draft.probs, np.float64)
    emitted: list[int] = []
    for i, token in enumerate(draft.tokens):
        p, q = float(target[i, token]), 1.0 if drafted is None else float(drafted[i, token])
        # u < p / q without the division: q may be rounded to 0
        if not _uniform(seed, position + i, choice) * q < p:
            rest = _residual(target[i], token, None if drafted is None else drafted[i])
            emitted.append(draw(rest, seed, position + i, choice, philox.RESIDUAL))
            return VerifyResult(tuple(emitted), len(draft.tokens), i)
        emitted.append(int(token))
    count = len(emitted)
    emitted.append(draw(target[count], seed, position + count, choice, philox.TOKEN))
    return VerifyResult(tuple(emitted), count, count)


def _uniform(seed: int, position: int, choice: int) -> float:
    """Uniform number in (0, 1) of the accept test at a position."""
    return _uniforms(seed, choice, position // BLOCK)[position % BLOCK]


def _residual(p: Float64, token: int, q: Float64 | None) -> Float64:
    """max(p - q, 0), not normalised: argmax of log + Gumbel does not need it."""
    if q is None:
        rest = p.copy()
        rest[token] = 0.0
    else:
        rest = np.maximum(p - q, 0.0)
    return rest if rest.any() else p  # p equals q up to rounding


def draw(weights: Float64, seed: int, position: int, choice: int, stream: int) -> int:
    """Samples a token in proportion to non-negative weights [V]: argmax of log w + Gumbel noise, ties to the lowest id;
    -1 if all weights are 0.

    Noise is computed only for tokens that can win: it is at most GUMBEL_MAX, and the largest weight sets a lower bound.
    """
    top = np.array([int(weights.argmax())])
    if not weights[top[0]]:
        return -1
    bound = _scores(weights, top, seed, position, choice, stream)[0]
    floor = np.exp(bound - philox.GUMBEL_MAX) * 0.999
    alive = np.flatnonzero(weights > max(floor, np.finfo(np.float64).tiny))
    return int(alive[_scores(weights, alive, seed, position, choice, stream).argmax()])


def _scores(weights: Float64, ids: NDArray[np.int64], seed: int, position: int, choice: int, stream: int) -> Float64:
    noise: Float64 = philox.numpy_gumbel(ids, seed, position, choice, stream)
    noise += philox.numpy_log(weights[ids])
    return noise


BLOCK = 256  # number of positions whose uniforms are computed in one call, which costs about as much for one position


class SyntheticVerifier:
    """Accepts drafts at given rates, by noise that depends on seed, choice and position only.

    rates[i] is the share of drafts whose first i + 1 tokens are all accepted, as in vLLM's `synthetic_acceptance_rates`
    and llama.cpp's `--spec-synth-rates`.
    """

    def __init__(self, rates: Seq[float]) -> None:
        self.rates = tuple(rates)
        pairs = pairwise((1.0, *rates))
        self._probabilities = tuple(rate / before if before else 0.0 for before, rate in pairs)

    def verify(self, draft: Seq[int], targets: Seq[int], seed: int, choice: int, position: int) -> VerifyResult:
        """Accepts token i of draft [k], if those before it are accepted, with probability rates[i] / rates[i - 1] (0
        beyond the last rate), then adds the target's token. position: absolute position of the first drafted token."""
        accepted = self.accepts(len(draft), seed, choice, position)
        return VerifyResult((*draft[:accepted], targets[accepted]), len(draft), accepted)

    def accepts(self, count: int, seed: int, choice: int, position: int) -> int:
        """Number of accepted tokens of a draft of `count` tokens."""
        accepted = 0
        for place, probability in zip(range(position, position + count), self._probabilities, strict=False):
            if _uniform(seed, place, choice) >= probability:
                break
            accepted += 1
        return accepted


@lru_cache(maxsize=1024)
def _uniforms(seed: int, choice: int, block: int) -> list[float]:
    """Uniform numbers in (0, 1) of the positions block * BLOCK .. (block + 1) * BLOCK - 1."""
    positions = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.int64)
    fixed = [np.array([word], np.int64) for word in (0, choice, philox.ACCEPT)]
    low, high = (np.array([word], np.int64) for word in philox.split_seed(seed))
    words = philox.philox((fixed[0], positions, fixed[1], fixed[2]), (low, high))
    drawn: list[float] = philox.uniform(words[0], np.float64).tolist()
    return drawn
