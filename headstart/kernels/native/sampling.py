"""Logits to tokens in C++ (csrc/sampling.h): the tokens and the bits of reference/sampling, without torch.

Shapes: L rows, W logits of a row (V, or those of a reduced draft vocabulary), V vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headstart.core import NOT_FINITE, NOTHING_LEFT, Float32, Int64, Sampled, SamplingRows, TokenLogprob
from headstart.kernels.native import _native

_REASONS = {_native.NOTHING_LEFT: NOTHING_LEFT, _native.NOT_FINITE: NOT_FINITE}


def sample(
    pool: _native.ThreadPool,
    path: str,
    logits: Float32,
    rows: SamplingRows,
    *,
    vocab_size: int,
    token_ids: Int64 | None = None,
    keep_probs: bool = False,
) -> Sampled:
    """One token for each row of logits [L, W]; rows may lie apart in memory, a row's logits may not.

    token_ids: ascending target ids [W] of a reduced draft vocabulary. keep_probs: also return the processed
    distribution as float64 [L, vocab_size] (greedy rows one-hot). Rows without a token fail alone (see Sampled).
    """
    tokens = np.empty(len(rows), np.int64)
    probs = np.zeros((len(rows), vocab_size)) if keep_probs else None
    _native.sample(pool, path, logits, rows, vocab_size, token_ids, tokens, probs)
    failures = {row: _REASONS[token] for row, token in enumerate(tokens.tolist()) if token < 0}
    num_top = rows.num_logprobs
    if failures:
        num_top = np.where(tokens < 0, -1, num_top)
        tokens = np.maximum(tokens, -1)
    asked: list[int] = num_top.tolist()
    if max(asked, default=-1) < 0:
        return Sampled(tokens, [None] * len(asked), probs, failures)
    if token_ids is None:
        logits = logits[:, :vocab_size]
    return Sampled(tokens, _logprobs(pool, path, logits, token_ids, tokens, num_top.astype(np.int64)), probs, failures)


def logprobs(
    pool: _native.ThreadPool, path: str, logits: Float32, tokens: Int64, num_top: int | NDArray[np.integer]
) -> list[TokenLogprob]:
    """Raw log-softmax of logits [L, V] at one token of each row [L], and the row's num_top (one, or [L]) best."""
    counts = np.full(len(tokens), num_top, np.int64)
    return [found for found in _logprobs(pool, path, logits, None, tokens, counts) if found is not None]


def _logprobs(
    pool: _native.ThreadPool, path: str, logits: Float32, token_ids: Int64 | None, tokens: Int64, num_top: Int64
) -> list[TokenLogprob | None]:
    """Of rows with num_top >= 0; None of the others."""
    count = len(tokens)
    room = max(int(num_top.max(initial=0)), 0)
    values, num_found = np.zeros(count, np.float32), np.zeros(count, np.int64)
    top_ids, top_values = np.empty((count, room), np.int64), np.empty((count, room), np.float32)
    _native.logprobs(pool, path, logits, token_ids, tokens, num_top, values, top_ids, top_values, num_found)
    entries = zip(
        num_top.tolist(), tokens.tolist(), values.tolist(), top_ids.tolist(), top_values.tolist(), num_found.tolist(),
        strict=True,
    )  # fmt: skip
    return [
        TokenLogprob(token, value, tuple(zip(ids[:found], tops[:found], strict=True))) if asked >= 0 else None
        for asked, token, value, ids, tops, found in entries
    ]
