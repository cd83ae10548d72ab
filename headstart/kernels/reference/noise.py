"""Gumbel-max draws in torch: argmax over v of l_v + g(v), with noise computed only where a token can still win.

Pruned and unpruned draws give the same token bit for bit: g lies between known bounds, so a token far below the best
score cannot win whatever its noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headstart.core import Int64, SamplingRows
from headstart.kernels import philox

_MASK = 0xFFFFFFFF
_DENSE_SHARE = 8  # more than V / 8 candidates: one counter for 4 neighbours beats one counter per token


@dataclass(frozen=True, eq=False)
class NoiseKeys:
    """Philox key and counter parts of L rows, each [L] int64 on the logits' device."""

    low: Tensor
    high: Tensor
    position: Tensor
    choice: Tensor
    stream: int = philox.TOKEN

    @classmethod
    def of(cls, rows: SamplingRows, picked: Int64, device: torch.device) -> NoiseKeys:
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
        parts = (groups, self.position[row], self.choice[row], torch.full_like(row, self.stream))
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
    """numpy costs a fifth of torch per call on short CPU arrays, and gives the same bits."""
    return x.device.type == "cpu" and x.numel() < 4096


def first_max(scores: Tensor, best: Tensor | None = None) -> Tensor:
    """Lowest column of the maximum of each row of [L, V] -> [L]. torch.argmax does not promise the lowest."""
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(-1))  # numpy does promise it
    best = scores.amax(-1) if best is None else best
    columns = torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(scores == best[:, None], columns, scores.shape[-1]).amin(-1)


def draw(scores: Tensor, best: Tensor, keys: NoiseKeys, token_ids: Tensor | None, vocab_size: int,
         prune: bool = True) -> Tensor:  # fmt: skip
    """Columns [L] of argmax(scores + noise) for float64 scores [L, V'] with row maxima `best` [L]."""
    if not prune:
        words = _all_words(scores, keys, token_ids, vocab_size)
        return first_max(scores + gumbel(words))
    top = first_max(scores, best)
    every = torch.arange(len(scores), device=scores.device)
    bound = best + gumbel(keys.words(every, _target(top, token_ids)))  # some token reaches this
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
    """Rows and columns that may reach the bound b: l + g >= b needs v <= 1 - exp(-exp(l - b)) <= exp(l - b). float32
    is enough with 0.1 % to spare, and no log is taken of what is ruled out."""
    reach = (scores - bound[:, None]).float().exp_().mul_(2.0**32 * 1.001)
    row, column = (words.float() <= reach.add_(1.0)).nonzero(as_tuple=True)
    return row, column


def _winners(num_rows: int, row: Tensor, column: Tensor, score: Tensor) -> Tensor:
    """Lowest column of the best score of each row, from a list of candidates."""
    best = torch.full((num_rows,), -torch.inf, dtype=score.dtype, device=score.device)
    best.scatter_reduce_(0, row, score, "amax")
    column = torch.where(score == best[row], column, torch.iinfo(torch.int64).max)
    first = torch.full((num_rows,), torch.iinfo(torch.int64).max, device=score.device)
    return first.scatter_reduce_(0, row, column, "amin")
