"""Sampling in plain torch, in the order that SamplingRows documents; the bits of a row do not depend on other rows.

Scores are float64 (exact for float32 logits). Sums of probability mass (top-p, logprobs) are fixed-point int64, so
their order does not matter. Ties and cut-offs go to the lowest token id."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core import GREEDY_BELOW, NOT_FINITE, NOTHING_LEFT, Int64, Sampled, SamplingRows, TokenLogprob
from headstart.kernels import philox

_MASK = 0xFFFFFFFF
_DENSE_SHARE = 8  # more than V / 8 candidates: one Philox call per 4 neighbours is cheaper than one per token


@dataclass(frozen=True, eq=False)
class NoiseKeys:
    """Philox key and counter parts of L rows, each [L] int64 on the logits' device."""

    low: Tensor  # of the seed
    high: Tensor
    position: Tensor
    choice: Tensor

    @classmethod
    def of(cls, rows: SamplingRows, picked: Int64, device: torch.device) -> "NoiseKeys":
        """The keys of the picked rows."""
        seed = rows.seed[picked]
        parts = (seed & np.uint64(_MASK), seed >> np.uint64(32), rows.position[picked] & _MASK, rows.choice[picked])
        low, high, position, choice = (torch.from_numpy(part.astype(np.int64)).to(device) for part in parts)
        return cls(low, high, position, choice)

    def words(self, row: Tensor, ids: Tensor) -> Tensor:
        """The noise word of token ids[i] in row row[i]: [N] int64."""
        words = self._philox(ids >> 2, row)
        return torch.stack(words).gather(0, (ids & 3)[None])[0]

    def dense_words(self, vocab_size: int) -> Tensor:
        """The noise words of every token of every row: [L, vocab_size rounded up to 4] int64."""
        groups = torch.arange((vocab_size + 3) // 4, device=self.low.device)[None]
        words = self._philox(groups, torch.arange(len(self.low), device=self.low.device)[:, None])
        return torch.stack(words, dim=-1).flatten(1)

    def _philox(self, groups: Tensor, row: Tensor) -> tuple[Tensor, ...]:
        parts = (groups, self.position[row], self.choice[row], torch.full_like(row, philox.TOKEN))
        key = (self.low[row], self.high[row])
        if _on_host(groups):
            counter = tuple(part.numpy() for part in parts)
            words = philox.philox((counter[0], counter[1], counter[2], counter[3]), (key[0].numpy(), key[1].numpy()))
            return tuple(torch.from_numpy(word) for word in words)
        return philox.philox((groups, parts[1], parts[2], parts[3]), key)


def gumbel(words: Tensor) -> Tensor:
    """Gumbel noise (float64) of int64 noise words."""
    if _on_host(words):
        return torch.from_numpy(philox.gumbel(words.numpy(), np.int64, np.float64))
    noise: Tensor = philox.gumbel(words, torch.int64, torch.float64)
    return noise


def _on_host(x: Tensor) -> bool:
    """Use numpy? On short CPU arrays a call costs a fifth of torch's, with the same bits."""
    return x.device.type == "cpu" and x.numel() < 4096


def first_max(scores: Tensor, best: Tensor | None = None) -> Tensor:
    """Lowest column of each row's maximum: [L, V] -> [L]. torch.argmax does not guarantee the lowest."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(-1))  # numpy guarantees the lowest
    best = scores.amax(-1) if best is None else best
    columns = torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(scores == best[:, None], columns, scores.shape[-1]).amin(-1)


def draw(scores: Tensor, best: Tensor, keys: NoiseKeys, token_ids: Tensor | None, vocab_size: int,
         prune: bool | None = None) -> Tensor:  # fmt: skip
    """Columns [L] of argmax(scores + Gumbel noise) for float64 scores [L, V'] with row maxima `best` [L].

    prune: draw noise only for tokens that can win. None: where that is less work."""
    if not (prune or (prune is None and not _on_host(scores))):
        words = _all_words(scores, keys, token_ids, vocab_size)
        return first_max(scores + gumbel(words))
    top = first_max(scores, best)
    rows = torch.arange(len(scores), device=scores.device)
    bound = best + gumbel(keys.words(rows, _target(top, token_ids)))  # reached by the best token
    alive = scores >= (bound - philox.GUMBEL_MAX)[:, None]
    if int(alive.sum()) * _DENSE_SHARE > scores.numel():
        words = _all_words(scores, keys, token_ids, vocab_size)
        row, column = _can_win(scores, bound, words)
        drawn = words[row, column]
    else:
        row, column = alive.nonzero(as_tuple=True)
        drawn = keys.words(row, _target(column, token_ids))
    return _winners(len(scores), row, column, scores[row, column] + gumbel(drawn))


def _target(columns: Tensor, token_ids: Tensor | None) -> Tensor:
    return columns if token_ids is None else token_ids[columns]


def _all_words(scores: Tensor, keys: NoiseKeys, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    words = keys.dense_words(vocab_size)
    return words[:, : scores.shape[-1]] if token_ids is None else words[:, token_ids]


def _can_win(scores: Tensor, bound: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns that may reach the bound b: l + g >= b needs v <= 1 - exp(-exp(l - b)) <= exp(l - b).

    float32 with a margin of 0.1 % is accurate enough; only these columns need logarithms."""
    reach = (scores - bound[:, None]).float().exp_().mul_(2.0**32 * 1.001)
    row, column = (words.float() <= reach.add_(1.0)).nonzero(as_tuple=True)
    return row, column


def _winners(num_rows: int, row: Tensor, column: Tensor, score: Tensor) -> Tensor:
    """Lowest column of each row's best score, from candidates (row, column, score) [N]."""
    best = torch.full((num_rows,), -torch.inf, dtype=score.dtype, device=score.device)
    best.scatter_reduce_(0, row, score, "amax")
    column = torch.where(score == best[row], column, torch.iinfo(torch.int64).max)
    first = torch.full((num_rows,), torch.iinfo(torch.int64).max, device=score.device)
    return first.scatter_reduce_(0, row, column, "amin")


_MASS_ONE = 2.0**40  # mass of the best token; V < 2^23 tokens cannot overflow an int64
_BINS_PER_NAT, _NUM_BINS = 16, 28 * 16 + 1  # the last bin has no mass: exp(-28) < 2^-40
_INV_LN2, _LN2_HIGH, _LN2_LOW = 1.4426950216293335, 0.693145751953125, 1.428606765330187e-06  # float32 parts
_TAYLOR = tuple(1.0 / math.factorial(n) for n in range(7, -1, -1))


def sample(
    logits: Tensor, rows: SamplingRows, token_ids: Tensor | None, vocab_size: int, keep_probs: bool = False, *,
    prune: bool | None = None,
) -> Sampled:  # fmt: skip
    """Sample one token per row of float32 or float64 logits [L, V'].

    token_ids: ascending target ids [V'] of a reduced draft vocabulary; edits and noise use target ids. keep_probs: also
    return the processed distribution as a float64 tensor [L, vocab_size] (greedy rows: one-hot). prune: see `draw`; the
    tokens are the same. A row without a token fails alone (see Sampled).
    """
    if token_ids is None:
        logits = logits[:, :vocab_size]
    scores = _edit(logits, rows, token_ids, vocab_size)
    best = scores.amax(-1)
    failures = _failures(best)
    failed = torch.tensor(list(failures), dtype=torch.int64, device=logits.device)
    if failures:  # any finite numbers
        scores, best = scores.index_fill(0, failed, 0.0), best.index_fill(0, failed, 0.0)
    sampled = np.flatnonzero(rows.temperature >= GREEDY_BELOW)
    columns = first_max(scores, best) if len(sampled) < len(rows) else torch.zeros_like(best, dtype=torch.int64)
    probs = scores.new_zeros((len(rows), vocab_size), dtype=torch.float64) if keep_probs else None
    if len(sampled):
        picked = torch.from_numpy(sampled).to(logits.device)
        scores, best = _limit(scores, best, rows, sampled, picked)
        keys = NoiseKeys.of(rows, sampled, logits.device)
        columns[picked] = draw(scores, best, keys, token_ids, vocab_size, prune)
    tokens = columns if token_ids is None else token_ids[columns]
    if probs is not None:
        probs.scatter_(1, tokens[:, None], 1.0)
        if len(sampled):
            weights = exp((scores - best[:, None]).float()).double() / mass_total(scores, best)[:, None]
            probs[picked] = weights if token_ids is None else _spread(weights, token_ids, vocab_size)
        probs[failed] = 0.0
    tokens[failed] = -1
    host_tokens: Int64 = tokens.cpu().numpy()
    return Sampled(host_tokens, requested_logprobs(logits, rows, host_tokens, token_ids), probs, failures)


def _spread(weights: Tensor, token_ids: Tensor, vocab_size: int) -> Tensor:
    return weights.new_zeros((len(weights), vocab_size)).index_copy_(1, token_ids, weights)


def _failures(best: Tensor) -> dict[int, str]:
    """Rows without a token, from the row maxima [L], with the reason."""
    lost = ((row, value) for row, value in enumerate(best.tolist()) if not math.isfinite(value))
    return {row: NOTHING_LEFT if value == -math.inf else NOT_FINITE for row, value in lost}


# Mask, bans and bias, penalties: sparse edits of a copy.


def _edit(logits: Tensor, rows: SamplingRows, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits after mask, bias and penalties (float64), or the logits themselves without any."""
    if rows.allowed is None and not len(rows.bias_ids) and not len(rows.penalty_ids):
        return logits
    scores = logits.to(torch.float64, copy=True)
    if rows.allowed is not None:
        bits = np.unpackbits(rows.allowed.view(np.uint8), axis=-1, bitorder="little")[:, :vocab_size]
        allowed = torch.from_numpy(bits).to(scores.device).bool()
        scores.masked_fill_(~(allowed if token_ids is None else allowed[:, token_ids]), -math.inf)
    if len(rows.bias_ids):
        row, column, kept = _columns(rows.bias_indptr, rows.bias_ids, token_ids, scores)
        scores[row, column] += _on(rows.bias_values, scores)[kept]
    if len(rows.penalty_ids):
        _penalize(scores, rows, token_ids)
    return scores


def _penalize(scores: Tensor, rows: SamplingRows, token_ids: Tensor | None) -> None:
    row, column, kept = _columns(rows.penalty_indptr, rows.penalty_ids, token_ids, scores)
    repetition, presence, frequency = (_on(x, scores)[row] for x in (rows.repetition, rows.presence, rows.frequency))
    count = _on(rows.penalty_counts, scores)[kept]
    values = scores[row, column]
    values = torch.where(values > 0, values / repetition, values * repetition)
    scores[row, column] = values - (frequency * count + torch.where(count > 0, presence, 0.0))


def _columns(indptr: NDArray[Any], ids: NDArray[Any], token_ids: Tensor | None, scores: Tensor) -> tuple[Tensor, ...]:
    """(row, column, kept) of CSR entries (ids distinct within a row) whose tokens exist in these logits."""
    row = torch.from_numpy(np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))).to(scores.device)
    wanted = torch.from_numpy(ids.astype(np.int64)).to(scores.device)
    width = scores.shape[-1]
    if token_ids is None:
        kept, column = (wanted >= 0) & (wanted < width), wanted
    else:
        column = torch.searchsorted(token_ids, wanted).clamp_(max=width - 1)
        kept = token_ids[column] == wanted
    return row[kept], column[kept], kept


def _on(values: NDArray[Any], scores: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.float64)).to(scores.device)


# Temperature, min-p, top-k, top-p of sampled rows.


def _limit(scores: Tensor, best: Tensor, rows: SamplingRows, sampled: Int64, picked: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (float64) and maxima of the sampled rows after / T, min-p, top-k and top-p."""
    if len(sampled) < len(scores):
        scores, best = scores[picked], best[picked]
    temperature = _on(rows.temperature[sampled], scores)
    # A tensor divisor: some devices multiply by the reciprocal of a Python number.
    scores, best = scores.double() / temperature[:, None], best.double() / temperature
    if (rows.min_p[sampled] > 0).any():
        scores = _min_p(scores, best, rows.min_p[sampled])
    top_k = np.where(rows.top_k[sampled] > 0, rows.top_k[sampled], scores.shape[-1])
    if (limited := np.flatnonzero(top_k < scores.shape[-1])).size:
        _top_k(scores, limited, top_k[limited].astype(np.int64))
    if (limited := np.flatnonzero(rows.top_p[sampled] < 1)).size:
        _top_p(scores, best, limited, rows.top_p[sampled])
    return scores, best


def _min_p(scores: Tensor, best: Tensor, min_p: NDArray[np.float32]) -> Tensor:
    """Drop tokens whose probability is below min_p times the best one's: l < best + log(min_p)."""
    floor = np.full(len(min_p), -math.inf)
    floor[min_p > 0] = philox.numpy_log(min_p[min_p > 0].astype(np.float64))
    return scores.masked_fill_(scores < (best + _on(floor, scores))[:, None], -math.inf)


def _top_k(scores: Tensor, limited: Int64, top_k: Int64) -> None:
    """Keep the k best tokens of each limited row (ties: lower ids), in place."""
    index, k = (torch.from_numpy(x).to(scores.device)[:, None] for x in (limited, top_k))
    part = scores[index[:, 0]]
    cut = torch.topk(part, int(top_k.max())).values.gather(1, k - 1)
    above, tied = part > cut, part == cut
    num_tied = k - above.sum(-1, keepdim=True)
    if bool((tied.sum(-1, keepdim=True) > num_tied).any()):
        tied &= tied.cumsum(-1) <= num_tied
    scores[index[:, 0]] = part.masked_fill_(~(above | tied), -math.inf)


def _top_p(scores: Tensor, best: Tensor, limited: Int64, top_p: NDArray[np.float32]) -> None:
    """Keep the smallest set of best tokens (ties: lower ids) with top_p of each limited row's mass, in place.

    A histogram of mass by distance to the best finds the bin of the cut; only that bin is sorted."""
    index = torch.from_numpy(limited).to(scores.device)
    part = scores[index]
    below = (part - best[index, None]).float()
    masses = mass(below)
    bins = (below * -_BINS_PER_NAT).clamp_(max=_NUM_BINS - 1).long()
    histogram = masses.new_zeros((len(limited), _NUM_BINS)).scatter_add_(1, bins, masses)
    up_to = histogram.cumsum(-1)
    need = _on(top_p[limited], scores) * up_to[:, -1].double()
    cut = (up_to.double() < need[:, None]).sum(-1)
    before = (up_to - histogram).gather(1, cut[:, None])[:, 0]
    drop = bins >= cut[:, None]
    row, column = (bins == cut[:, None]).nonzero(as_tuple=True)
    kept = _prefix(row, part[row, column], masses[row, column], before, need)
    drop[row[kept], column[kept]] = False
    scores[index] = part.masked_fill_(drop, -math.inf)


def _prefix(row: Tensor, scores: Tensor, masses: Tensor, before: Tensor, need: Tensor) -> Tensor:
    """Indices of the tokens in each row's cut bin that are kept: best first, until before + mass >= need."""
    rows, values, weights = (x.cpu().numpy() for x in (row, scores, masses))
    start, goal = before.cpu().numpy(), need.cpu().numpy()
    order = np.lexsort((-values, rows))  # stable: lower ids first among equals
    rows, weights = rows[order], weights[order]
    ahead = np.cumsum(weights) - weights  # integer sums: exact
    ahead += start[rows] - ahead[np.searchsorted(rows, rows)]
    return torch.from_numpy(order[(ahead < goal[rows]) | (ahead == 0)]).to(row.device)


# Mass and logprobs.


def exp(x: Tensor) -> Tensor:
    """e^x for float32 x <= 0; 0 below -87. The bits of an element do not depend on its position.

    x = k ln 2 + r, |r| <= ln(2) / 2; Taylor series of degree 7 (error below 6e-9), then 2^k by its bits."""
    clamped = x.clamp(min=-87.0)
    k = (clamped * _INV_LN2).round_()
    r = (clamped - k * _LN2_HIGH) - k * _LN2_LOW
    series = r * _TAYLOR[0]
    for coefficient in _TAYLOR[1:-1]:
        series = series.add_(coefficient).mul_(r)
    series.add_(_TAYLOR[-1])
    power = k.int().add_(127).bitwise_left_shift_(23).view(torch.float32)
    return series.mul_(power).masked_fill_(x < -87.0, 0.0)


def mass(below: Tensor) -> Tensor:
    """Fixed-point e^x (int64, 1 = 2^40) of float32 distances to the maximum."""
    return exp(below).mul_(_MASS_ONE).long()


def mass_total(scores: Tensor, best: Tensor) -> Tensor:
    """Sum of e^(score - best) over each row, float64 [L]."""
    return mass((scores - best[:, None]).float()).sum(-1).double() * (1 / _MASS_ONE)


def logprobs(
    logits: Tensor, tokens: NDArray[Any], num_top: NDArray[Any], token_ids: Tensor | None = None
) -> list[TokenLogprob]:
    """Raw log-softmax of unprocessed logits [N, V'] at tokens [N], and the num_top [N] most likely tokens.

    l - max - log(sum e^(l - max)) in float64, rounded to float32. Ties: the lowest id."""
    scores = logits.double()
    best = scores.amax(-1)
    log_total = _on(philox.numpy_log(mass_total(scores, best).cpu().numpy()), scores)
    wanted = torch.from_numpy(tokens.astype(np.int64)).to(scores.device)
    columns = wanted if token_ids is None else torch.searchsorted(token_ids, wanted)
    chosen = scores.gather(1, columns[:, None])[:, 0] - best - log_total
    tops = (_top(*row, token_ids) for row in zip(scores, best, log_total, num_top.tolist(), strict=True))
    values = chosen.masked_fill(~best.isfinite(), math.nan).float().tolist()
    return [TokenLogprob(int(t), v, top) for t, v, top in zip(tokens, values, tops, strict=True)]


def _top(
    scores: Tensor, best: Tensor, log_total: Tensor, count: int, token_ids: Tensor | None
) -> tuple[tuple[int, float], ...]:
    if not count or not math.isfinite(float(best)):  # no top tokens in a row with NaN or infinity
        return ()
    count = min(count, len(scores))
    columns = (scores >= torch.topk(scores, count).values[-1]).nonzero()[:, 0]
    columns = columns[scores[columns].sort(descending=True, stable=True).indices[:count]]
    values = (scores[columns] - best - log_total).float().tolist()
    return tuple(zip((columns if token_ids is None else token_ids[columns]).tolist(), values, strict=True))


def requested_logprobs(
    logits: Tensor, rows: SamplingRows, tokens: Int64, token_ids: Tensor | None
) -> list[TokenLogprob | None]:
    """Logprobs of the rows that request them and have a token; None for the others."""
    found: list[TokenLogprob | None] = [None] * len(rows)
    if (wanted := np.flatnonzero((rows.num_logprobs >= 0) & (tokens >= 0))).size:
        part = logits if len(wanted) == len(rows) else logits[torch.from_numpy(wanted).to(logits.device)]
        made = logprobs(part, tokens[wanted], rows.num_logprobs[wanted], token_ids)
        for row, logprob in zip(wanted, made, strict=True):
            found[row] = logprob
    return found
