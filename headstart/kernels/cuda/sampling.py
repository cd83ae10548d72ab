"""Logits to tokens on the device: the tokens, bit for bit, of reference/sampling.py, without waiting for any.

Shapes: L rows, W logits of a row (V, or those of a reduced draft vocabulary), T tiles of W.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core import GREEDY_BELOW, SamplingRows
from headstart.kernels import philox
from headstart.kernels.cuda.arrival import sent
from headstart.kernels.cuda.kernels import sampling as kernels
from headstart.kernels.cuda.launch import Launcher, tile_of

SPARSE = 64
"""Sparse edits that a program makes together."""
EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""A multiply-add that is rounded once has other bits than those of the host."""


@dataclass(frozen=True, eq=False)
class DrawRows:
    """SamplingRows on the device. `limited`: min-p, top-k or top-p; `edited`: mask, bias or penalties."""

    count: int
    reals: Tensor  # [6, L] temperature, log of min-p, top-p, repetition, presence, frequency
    ints: Tensor  # [4, L] seed, position, choice, top-k
    limited: bool
    bias: tuple[Tensor, Tensor, Tensor] | None
    penalties: tuple[Tensor, Tensor, Tensor] | None
    allowed: Tensor | None

    @property
    def edited(self) -> bool:
        return self.bias is not None or self.penalties is not None or self.allowed is not None

    @classmethod
    def of(cls, rows: SamplingRows, place: torch.device, count: int | None = None) -> DrawRows:
        """`count`: filled up to so many rows, which are greedy."""
        count = len(rows) if count is None else count

        def moved(*arrays: NDArray[Any]) -> Any:
            return tuple(sent(each, place) for each in arrays)

        def starts(indptr: NDArray[Any]) -> NDArray[Any]:
            return np.pad(indptr, (0, count + 1 - len(indptr)), mode="edge")

        reals, ints = parameters(rows, count)
        allowed = rows.allowed
        if allowed is not None:
            allowed = np.pad(allowed.view(np.int32), ((0, count - len(rows)), (0, 0)), constant_values=-1)
        return cls(
            count=count,
            reals=moved(reals)[0],
            ints=moved(ints)[0],
            limited=is_limited(rows),
            bias=moved(starts(rows.bias_indptr), rows.bias_ids, rows.bias_values) if len(rows.bias_ids) else None,
            penalties=moved(starts(rows.penalty_indptr), rows.penalty_ids, rows.penalty_counts)
            if is_penalized(rows)
            else None,
            allowed=None if allowed is None else moved(allowed)[0],
        )

    def update(self, rows: SamplingRows) -> None:
        """Other rows without edits, into the same places."""
        assert not self.edited
        for place, array in zip((self.reals, self.ints), parameters(rows, self.count), strict=True):
            place.copy_(torch.from_numpy(array), non_blocking=True)


def is_limited(rows: SamplingRows) -> bool:
    """Has one of them min-p, top-k or top-p?"""
    limits = (rows.min_p > 0) | (rows.top_k > 0) | (rows.top_p < 1)
    return bool(((rows.temperature >= GREEDY_BELOW) & limits).any())


def is_penalized(rows: SamplingRows) -> bool:
    penalized = (rows.repetition != 1) | (rows.presence != 0) | (rows.frequency != 0)
    return bool(len(rows.penalty_ids) or penalized.any())


def is_edited(rows: SamplingRows) -> bool:
    """Mask, bias or penalties?"""
    return rows.allowed is not None or len(rows.bias_ids) > 0 or is_penalized(rows)


def parameters(rows: SamplingRows, count: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """`reals` [6, count] and `ints` [4, count] of DrawRows."""
    floor = np.full(len(rows), -np.inf)
    some = rows.min_p > 0
    floor[some] = philox.numpy_log(rows.min_p[some].astype(np.float64))
    reals, ints = np.zeros((6, count)), np.zeros((4, count), np.int64)
    reals[1], reals[2:4] = -np.inf, 1.0
    told = (rows.temperature, floor, rows.top_p, rows.repetition, rows.presence, rows.frequency)
    reals[:, : len(rows)] = np.stack(told)
    ints[:, : len(rows)] = np.stack((rows.seed.view(np.int64), rows.position, rows.choice, rows.top_k))
    return reals, ints


class Sampler:
    """The kernels of kernels/sampling.py over rows of logits."""

    def __init__(self, launch: Launcher) -> None:
        self._launch, self._place = launch, launch.device.place

    def draw(self, logits: Tensor, rows: DrawRows, token_ids: Tensor | None, drawn: Tensor, number: int = 0) -> None:
        """Put the token of each row of logits [L, W] into column `number` of drawn [L, D]: -1 where none is left, -2
        where logits are not finite. Columns before it have tokens that were drawn since `rows`: they count in positions
        and penalties."""
        count, width, mapped = rows.count, logits.shape[1], token_ids is not None
        scores, stride = (self._edited(logits, rows, token_ids, drawn, number), width) if rows.edited else (
            logits, logits.stride(0))  # fmt: skip
        tile = min(tile_of(width), self._launch.device.elements)
        tiles = -(-width // tile)
        most, grid = tile_of(tiles), (count, tiles)
        peaks, values = (torch.empty(count, tiles, dtype=torch.float64, device=self._place) for _ in range(2))
        columns = torch.empty(count, tiles, dtype=torch.int32, device=self._place)
        kernels.peak[grid](scores, peaks, width, stride, TILE=tile, **EXACT)
        cuts, lasts = rows.ints, rows.ints
        if rows.limited:
            cuts = torch.empty(3, count, dtype=torch.int64, device=self._place)
            lasts = torch.empty(2, count, dtype=torch.int32, device=self._place)
            kernels.limit[(count,)](
                scores, peaks, rows.reals, rows.ints, cuts, lasts, width, stride, count, tiles, TILES=most, TILE=tile,
                num_warps=8, **EXACT,
            )  # fmt: skip
        kernels.noisy[grid](
            scores, peaks, rows.reals, rows.ints, cuts, lasts, token_ids, values, columns, width, stride, count, tiles,
            number, LIMITED=rows.limited, MAPPED=mapped, TILES=most, TILE=tile, **EXACT,
        )  # fmt: skip
        kernels.pick[(count,)](
            values, columns, peaks, token_ids, drawn, tiles, drawn.stride(0), number, MAPPED=mapped, TILES=most
        )

    def _edited(self, logits: Tensor, rows: DrawRows, token_ids: Tensor | None, drawn: Tensor, number: int) -> Tensor:
        """Scores [L, W] after mask, bias and penalties."""
        count, width, mapped = rows.count, logits.shape[1], token_ids is not None
        scores = torch.empty(count, width, dtype=torch.float64, device=self._place)
        tile, mask = min(tile_of(width), self._launch.device.elements), rows.allowed
        kernels.edit[(count, -(-width // tile))](
            logits, mask, token_ids, scores, width, logits.stride(0), 0 if mask is None else mask.stride(0),
            MASKED=mask is not None, MAPPED=mapped, TILE=tile,
        )  # fmt: skip
        if rows.bias:
            kernels.bias[(count,)](scores, *rows.bias, token_ids, width, MAPPED=mapped, TILE=SPARSE)
        if rows.penalties:
            kernels.penalize[(count,)](
                scores, *rows.penalties, rows.reals, drawn, token_ids, width, count, number, drawn.stride(0),
                MAPPED=mapped, TILE=SPARSE, **EXACT,
            )  # fmt: skip
        return scores

    def logprobs(self, logits: Tensor, drawn: Tensor, token_ids: Tensor | None, out: Tensor, number: int = 0) -> None:
        """Put the log-probability of each token of column `number` of drawn [L, D], in the raw softmax of logits
        [L, W], into that column of out [L, D]."""
        count, width, mapped = *logits.shape, token_ids is not None
        kernels.logprob[(count,)](
            logits, drawn, token_ids, out, width, logits.stride(0), drawn.shape[1], number, MAPPED=mapped,
            TILE=min(tile_of(width), 4 * self._launch.device.elements), **EXACT,
        )  # fmt: skip
