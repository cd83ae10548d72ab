"""Builds SamplingRows: the sampling parameters of each token to be drawn."""

import math
from collections.abc import Mapping, Sequence as Seq
from functools import lru_cache
from itertools import accumulate, chain, groupby, islice
from operator import itemgetter
from typing import Any, NamedTuple, get_type_hints

import numpy as np
from numpy.typing import NDArray

from headstart.core import Float32, Int32, Mask, RowConstants, SamplingRows, Sequence, TokenCounts, int_array

Entry = tuple[Sequence, int, Seq[int]]
"""A token to draw: its sequence, its absolute position, and the drafted tokens before it."""

_BY_TYPE: Mapping[type, Any] = {float: np.float32, int: np.int32}
_HINTS = get_type_hints(RowConstants).items()
_DTYPES: Mapping[str, Any] = {name: _BY_TYPE[kind] for name, kind in _HINTS if kind in _BY_TYPE} | {"seed": np.uint64}
"""Columns of SamplingRows that are constants of a sequence."""
CACHED_MIXTURES = 128  # number of batches whose constant columns are cached: a batch stays the same for many steps


def allowed_tokens(entries: Seq[Entry], vocab_size: int) -> Mask | None:
    """[L, ceil(V / 32)] masks of the entries, each after its drafted prefix; None if every token is allowed.

    The entries of a sequence are adjacent, and each prefix extends the one before.
    """
    if not [sequence for sequence, _, _ in entries if sequence.is_masked]:
        return None
    allowed = np.full((len(entries), -(-vocab_size // 32)), 0xFFFFFFFF, np.uint32)
    end = 0
    for sequence, group in groupby(entries, itemgetter(0)):
        prefixes = [prefix for _, _, prefix in group]
        start, end = end, end + len(prefixes)
        if sequence.constraint is not None:
            allowed[start:end] = sequence.constraint.masks(prefixes[-1], len(prefixes))
        if sequence.request.allowed is not None:
            allowed[start:end] &= sequence.request.allowed
    return allowed


def is_steady(sequence: Sequence) -> bool:
    """True if the sequence's next rows differ only in their positions and penalty counts."""
    request = sequence.request
    bans_now = request.banned_until_min and sequence.num_output < request.params.min_tokens
    return sequence.constraint is None and not request.banned and not bans_now


def is_plain(sequence: Sequence) -> bool:
    """True if the sequence's next rows differ only in their positions."""
    constants = sequence.row_constants
    edited = constants.has_bias or constants.has_penalties or sequence.is_masked
    return is_steady(sequence) and not edited


def build_rows(entries: Seq[Entry], *, allowed: Mask | None = None, num_logprobs: int | None = None) -> SamplingRows:
    """SamplingRows of L entries, each in the state after its context and drafted prefix.

    allowed: [L, ceil(V / 32)] token masks, passed on. num_logprobs: for every row, in place of the requests' numbers.
    """
    constants = _constants(tuple([sequence.row_constants for sequence, _, _ in entries]), num_logprobs)
    bias_indptr, bias_ids, bias_values = _bias(entries, allowed) if constants.has_bias else constants.no_bias
    penalty_indptr, penalty_ids, penalty_counts = (
        _penalties(entries) if constants.has_penalties else constants.no_penalties
    )
    return SamplingRows(
        **constants.columns, position=np.array([position for _, position, _ in entries], np.int64),
        bias_indptr=bias_indptr, bias_ids=bias_ids, bias_values=bias_values, penalty_indptr=penalty_indptr,
        penalty_ids=penalty_ids, penalty_counts=penalty_counts, allowed=allowed,
    )  # fmt: skip


class _Constants(NamedTuple):
    """Columns of SamplingRows that do not change from step to step; read-only."""

    columns: dict[str, NDArray[Any]]
    has_bias: bool
    has_penalties: bool
    no_bias: tuple[Int32, Int32, Float32]
    no_penalties: tuple[Int32, Int32, Int32]


@lru_cache(CACHED_MIXTURES)
def _constants(rows: tuple[RowConstants, ...], num_logprobs: int | None) -> _Constants:
    columns = {name: np.array([getattr(row, name) for row in rows], dtype) for name, dtype in _DTYPES.items()}
    if num_logprobs is not None:
        columns["num_logprobs"] = np.full(len(rows), num_logprobs, np.int32)
    indptr, no_ints, no_floats = np.zeros(len(rows) + 1, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)
    for array in (*columns.values(), indptr, no_ints, no_floats):
        array.flags.writeable = False
    return _Constants(
        columns, has_bias=any(row.has_bias for row in rows), has_penalties=any(row.has_penalties for row in rows),
        no_bias=(indptr, no_ints, no_floats), no_penalties=(indptr, no_ints, no_ints),
    )  # fmt: skip


def update_counts(sequence: Sequence) -> TokenCounts:
    """Brings Sequence.counts up to date with the committed tokens; reads only new tokens."""
    counts, num_prompt = sequence.counts, sequence.num_prompt
    for token in islice(sequence.tokens, counts.num_read, None):
        index = counts.places.setdefault(token, len(counts.ids))
        if index == len(counts.ids):
            counts.ids.append(token)
            counts.counts.append(0)
        counts.counts[index] += counts.num_read >= num_prompt
        counts.num_read += 1
    return counts


def _bias(entries: Seq[Entry], allowed: Mask | None) -> tuple[Int32, Int32, Float32]:
    """CSR of logit_bias, ids banned by min_tokens, and last tokens of bad words; ids are distinct within a row.

    A constraint overrides min_tokens: if it allows banned ids only, they are not banned.
    """
    edits: list[Mapping[int, float]] = []
    for row, (sequence, _, prefix) in enumerate(entries):
        request = sequence.request
        edit = request.params.logit_bias
        if request.banned_until_min and sequence.num_output + len(prefix) < request.params.min_tokens:
            mask = None if allowed is None or sequence.constraint is None else allowed[row]
            if mask is None or not _holds_only(mask, request.banned_until_min):
                edit = {**edit, **dict.fromkeys(request.banned_until_min, -math.inf)}
        if request.banned:
            edit = {**edit, **dict.fromkeys(_banned_ends(sequence, prefix), -math.inf)}
        edits.append(edit)
    ids = list(chain.from_iterable(edits))
    values = list(chain.from_iterable([edit.values() for edit in edits]))
    return _indptr([len(edit) for edit in edits]), np.array(ids, np.int32), np.array(values, np.float32)


def _banned_ends(sequence: Sequence, prefix: Seq[int]) -> list[int]:
    """Last tokens of bad words whose other tokens end the output and drafted prefix."""
    banned, start = sequence.request.banned, sequence.num_prompt
    longest = max([len(before) for before in banned])
    output = (*sequence.tokens[max(start, len(sequence.tokens) - longest) :], *prefix)
    return [last for before, ends in banned.items() if output[len(output) - len(before) :] == before for last in ends]


def _holds_only(mask: Mask, ids: frozenset[int]) -> bool:
    """True if all tokens of the mask are in `ids`."""
    rest = mask.copy()
    for token in ids:
        if 0 <= token < 32 * len(rest):
            rest[token // 32] &= ~np.uint32(1 << token % 32)
    return not rest.any()


def _penalties(entries: Seq[Entry]) -> tuple[Int32, Int32, Int32]:
    """CSR of distinct ids of prompt, output and drafted prefix, with their counts in output and prefix."""
    all_ids, all_counts, lengths = int_array(), int_array(), []
    for sequence, _, prefix in entries:
        start = len(all_ids)
        if sequence.row_constants.has_penalties:
            counts, new = update_counts(sequence), dict[int, int]()
            all_ids.extend(counts.ids)
            all_counts.extend(counts.counts)
            for token in prefix:
                index = counts.places.get(token)
                if index is None:
                    index = new.setdefault(token, len(all_ids) - start)
                if index == len(all_ids) - start:
                    all_ids.append(token)
                    all_counts.append(0)
                all_counts[start + index] += 1
        lengths.append(len(all_ids) - start)
    return _indptr(lengths), np.array(all_ids, np.int32), np.array(all_counts, np.int32)


def _indptr(lengths: list[int]) -> Int32:
    return np.array(list(accumulate(lengths, initial=0)), np.int32)
