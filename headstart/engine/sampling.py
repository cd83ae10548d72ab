"""Sequences to SamplingRows: what the sampler must know of each token to be drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence as Seq
from itertools import chain, islice

import numpy as np
from numpy.typing import NDArray

from headstart.core import SamplingParams, SamplingRows, Sequence

Entry = tuple[Sequence, int, Seq[int]]
"""A token to draw: its sequence, its absolute position in Sequence.tokens, the drafted tokens between them."""

_NO_INTS = np.zeros(0, np.int32)
_NO_FLOATS = np.zeros(0, np.float32)
for _shared in (_NO_INTS, _NO_FLOATS):
    _shared.flags.writeable = False


def build_rows(
    entries: Seq[Entry], *, allowed: NDArray[np.uint32] | None = None, logprobs: bool = True
) -> SamplingRows:
    """Sampling rows of L entries, each in the state after its context and drafted prefix.

    allowed: [L, ceil(V / 32)] token masks, passed on. logprobs=False (draft steps) asks for none.
    """
    params = [sequence.request.params for sequence, _, _ in entries]
    bias_indptr, bias_ids, bias_values = _bias(entries)
    penalty_indptr, penalty_ids, penalty_counts = _penalties(entries)
    return SamplingRows(
        temperature=_floats(p.temperature for p in params),
        top_k=np.array([min(p.top_k, 2**31 - 1) for p in params], np.int32),
        top_p=_floats(p.top_p for p in params),
        min_p=_floats(p.min_p for p in params),
        seed=np.array([sequence.request.seed for sequence, _, _ in entries], np.uint64),
        position=np.array([position for _, position, _ in entries], np.int64),
        choice=np.array([sequence.choice for sequence, _, _ in entries], np.int32),
        bias_indptr=bias_indptr,
        bias_ids=bias_ids,
        bias_values=bias_values,
        penalty_indptr=penalty_indptr,
        penalty_ids=penalty_ids,
        penalty_counts=penalty_counts,
        repetition=_floats(p.repetition_penalty for p in params),
        presence=_floats(p.presence_penalty for p in params),
        frequency=_floats(p.frequency_penalty for p in params),
        num_logprobs=np.array([_num_logprobs(p) if logprobs else -1 for p in params], np.int32),
        allowed=allowed,
    )


def has_penalties(params: SamplingParams) -> bool:
    """Does a request need the counts of its tokens?"""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def update_counts(sequence: Sequence) -> dict[int, int]:
    """Bring Sequence.counts up to its committed tokens: prompt ids from 0, output ids by occurrence. Reads only the
    tokens that are new since the last call."""
    counts = sequence.counts
    if not counts:
        counts.update(dict.fromkeys(sequence.request.prompt_ids, 0))
    for token in islice(sequence.tokens, sequence.num_prompt + sum(counts.values()), None):
        counts[token] = counts.get(token, 0) + 1
    return counts


def _floats(values: Iterable[float]) -> NDArray[np.float32]:
    return np.array(list(values), np.float32)


def _num_logprobs(params: SamplingParams) -> int:
    return -1 if params.logprobs is None else params.logprobs


def _bias(entries: Seq[Entry]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """CSR of logit_bias and of the ids banned until min_tokens are out; ids are distinct within a row."""
    edits: list[dict[int, float]] = []
    for sequence, _, prefix in entries:
        request = sequence.request
        edit = dict(request.params.logit_bias)
        if request.banned_until_min and sequence.num_output + len(prefix) < request.params.min_tokens:
            edit.update(dict.fromkeys(request.banned_until_min, -math.inf))
        edits.append(edit)
    indptr = _indptr(edits)
    if not indptr[-1]:
        return indptr, _NO_INTS, _NO_FLOATS
    ids = np.array(list(chain.from_iterable(edits)), np.int32)
    return indptr, ids, _floats(chain.from_iterable(edit.values() for edit in edits))


def _penalties(entries: Seq[Entry]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """CSR of the distinct ids of prompt, output and drafted prefix, with their counts outside the prompt."""
    rows: list[dict[int, int]] = []
    for sequence, _, prefix in entries:
        counts: dict[int, int] = {}
        if has_penalties(sequence.request.params):
            counts = update_counts(sequence)
            if prefix:
                counts = dict(counts)
                for token in prefix:
                    counts[token] = counts.get(token, 0) + 1
        rows.append(counts)
    indptr = _indptr(rows)
    if not indptr[-1]:
        return indptr, _NO_INTS, _NO_INTS
    ids = np.array(list(chain.from_iterable(rows)), np.int32)
    return indptr, ids, np.array(list(chain.from_iterable(row.values() for row in rows)), np.int32)


def _indptr(rows: Seq[dict[int, int]] | Seq[dict[int, float]]) -> NDArray[np.int32]:
    indptr = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([len(row) for row in rows], out=indptr[1:])
    return indptr
