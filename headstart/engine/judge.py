"""What a pass decided: how much of a draft stands, and the one token after it (numpy only).

`judge_exact` compares with the tokens the target drew itself (coupled sampling): the text does not depend on drafts.
`judge_rejection` follows Leviathan et al. (2211.17192) and Chen et al. (2302.01318): the same distribution, not the
same text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.core import Draft, TokenLogprob, Verdict
from headstart.kernels import philox

Float64 = NDArray[np.float64]


def judge_exact(draft: Seq[int], targets: Seq[int], logprobs: Seq[TokenLogprob | None] = ()) -> Verdict:
    """Accept the longest prefix of draft [k] that equals targets [k + 1]; then the target's own token, -1 where its row
    failed. `logprobs` are those of the targets."""
    accepted = 0
    while accepted < len(draft) and draft[accepted] == targets[accepted]:
        accepted += 1
    end = accepted + 1
    return Verdict(tuple(targets[:end]), len(draft), accepted, tuple(logprobs[:end]))


def judge_rejection(draft: Draft, target_probs: Any, seed: int, choice: int, position: int) -> Verdict:
    """Accept d_i with probability min(1, p(d_i) / q(d_i)); the first rejected one is redrawn from max(p - q, 0).

    target_probs: [k + 1, V] processed target distributions. draft.probs [k, V], or None for a one-hot draft (q = 1).
    position: absolute position of the first drafted token. Each position has its own uniform and its own noise. A row
    of zeros (a failed one) rejects, and its token is -1.
    """
    target = np.asarray(target_probs, np.float64)
    drafted = None if draft.probs is None else np.asarray(draft.probs, np.float64)
    emitted: list[int] = []
    for i, token in enumerate(draft.tokens):
        p, q = float(target[i, token]), 1.0 if drafted is None else float(drafted[i, token])
        # u < p / q without the division: q may be 0 where its tail was rounded away.
        if not _uniform(seed, position + i, choice) * q < p:
            rest = _residual(target[i], token, None if drafted is None else drafted[i])
            emitted.append(draw(rest, seed, position + i, choice, philox.RESIDUAL))
            return Verdict(tuple(emitted), len(draft.tokens), i)
        emitted.append(int(token))
    count = len(emitted)
    emitted.append(draw(target[count], seed, position + count, choice, philox.TOKEN))
    return Verdict(tuple(emitted), count, count)


def _uniform(seed: int, position: int, choice: int) -> float:
    words = philox.numpy_words(np.zeros(1, np.int64), seed, position, choice, philox.ACCEPT)
    return float(philox.uniform(words, np.float64)[0])


def _residual(p: Float64, token: int, q: Float64 | None) -> Float64:
    """max(p - q, 0), not normalised: argmax of log + Gumbel does not need it."""
    if q is None:
        rest = p.copy()
        rest[token] = 0.0
    else:
        rest = np.maximum(p - q, 0.0)
    return rest if rest.any() else p  # p = q up to rounding: whatever is drawn, its error is that rounding


def draw(weights: Float64, seed: int, position: int, choice: int, stream: int) -> int:
    """Token drawn in proportion to non-negative weights [V]: lowest id of argmax(log w + Gumbel noise), or -1.

    Noise is drawn only where it can matter: g <= GUMBEL_MAX, and the heaviest token sets a score to beat."""
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
