"""Sampling on the device without waiting for the host; tokens equal those of reference/sampling.py.

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
from headstart.kernels.cuda.device import copy_to_device
from headstart.kernels.cuda.kernels import sampling as kernels
from headstart.kernels.cuda.launch import KernelLauncher, tile_size

EDIT_TILE = 64  # sparse edits (bias, penalties) per step of a program
EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Fused multiply-adds round once, so their bits differ from the host's."""


@dataclass(frozen=True, eq=False)
class DeviceSamplingRows:
    """SamplingRows on the device."""

    count: int
    reals: Tensor  # float64 [6, L]: temperature, log of min-p, top-p, repetition, presence, frequency
    ints: Tensor  # int64 [4, L]: seed, position, choice, top-k
    limited: bool  # some row uses min-p, top-k or top-p
    bias: tuple[Tensor, Tensor, Tensor] | None  # CSR: starts, ids, values
    penalties: tuple[Tensor, Tensor, Tensor] | None  # CSR: starts, ids, counts
    allowed: Tensor | None  # int32 [L, words]: bit mask of allowed tokens

    @property
    def edited(self) -> bool:
        """True if a row has a mask, bias or penalties."""
        return self.bias is not None or self.penalties is not None or self.allowed is not None

    @classmethod
    def of(cls, rows: SamplingRows, device: torch.device, count: int | None = None) -> DeviceSamplingRows:
        """Copy rows to the device, padded to `count` with greedy rows."""
        count = len(rows) if count is None else count

        def to_device(*arrays: NDArray[Any]) -> Any:
            return tuple(copy_to_device(each, device) for each in arrays)

        def starts(indptr: NDArray[Any]) -> NDArray[Any]:
            return np.pad(indptr, (0, count + 1 - len(indptr)), mode="edge")

        reals, ints = parameter_arrays(rows, count)
        allowed = rows.allowed
        if allowed is not None:
            allowed = np.pad(allowed.view(np.int32), ((0, count - len(rows)), (0, 0)), constant_values=-1)
        return cls(
            count=count,
            reals=to_device(reals)[0],
            ints=to_device(ints)[0],
            limited=is_limited(rows),
            bias=to_device(starts(rows.bias_indptr), rows.bias_ids, rows.bias_values) if len(rows.bias_ids) else None,
            penalties=to_device(starts(rows.penalty_indptr), rows.penalty_ids, rows.penalty_counts)
            if is_penalized(rows)
            else None,
            allowed=None if allowed is None else to_device(allowed)[0],
        )

    def update(self, rows: SamplingRows) -> None:
        """Copy the parameters of other rows without edits into the same buffers."""
        assert not self.edited
        for buffer, array in zip((self.reals, self.ints), parameter_arrays(rows, self.count), strict=True):
            buffer.copy_(torch.from_numpy(array), non_blocking=True)


def is_limited(rows: SamplingRows) -> bool:
    """True if a sampled row uses min-p, top-k or top-p."""
    limits = (rows.min_p > 0) | (rows.top_k > 0) | (rows.top_p < 1)
    return bool(((rows.temperature >= GREEDY_BELOW) & limits).any())


def is_penalized(rows: SamplingRows) -> bool:
    """True if a row has penalties."""
    penalized = (rows.repetition != 1) | (rows.presence != 0) | (rows.frequency != 0)
    return bool(len(rows.penalty_ids) or penalized.any())


def is_edited(rows: SamplingRows) -> bool:
    """True if a row has a mask, bias or penalties."""
    return rows.allowed is not None or len(rows.bias_ids) > 0 or is_penalized(rows)


def parameter_arrays(rows: SamplingRows, count: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """`reals` [6, count] and `ints` [4, count] of DrawRows."""
    floor = np.full(len(rows), -np.inf)
    has_min_p = rows.min_p > 0
    floor[has_min_p] = philox.numpy_log(rows.min_p[has_min_p].astype(np.float64))
    reals, ints = np.zeros((6, count)), np.zeros((4, count), np.int64)
    reals[1], reals[2:4] = -np.inf, 1.0
    values = (rows.temperature, floor, rows.top_p, rows.repetition, rows.presence, rows.frequency)
    reals[:, : len(rows)] = np.stack(values)
    ints[:, : len(rows)] = np.stack((rows.seed.view(np.int64), rows.position, rows.choice, rows.top_k))
    return reals, ints


class CudaSampler:
    """Launches the kernels of kernels/sampling.py over rows of logits."""

    def __init__(self, launch: KernelLauncher) -> None:
        self._launch, self._device = launch, launch.device.torch_device

    def draw(
        self, logits: Tensor, rows: DeviceSamplingRows, token_ids: Tensor | None, drawn: Tensor, number: int = 0
    ) -> None:
        """Sample a token per row of logits [L, W] into column `number` of drawn [L, D]; -1: no token is left, -2:
        logits are not finite.

        Earlier columns hold tokens drafted since `rows`, which advance positions and penalties."""
        count, width, mapped = rows.count, logits.shape[1], token_ids is not None
        scores, stride = (self._edited_scores(logits, rows, token_ids, drawn, number), width) if rows.edited else (
            logits, logits.stride(0))  # fmt: skip
        tile = min(tile_size(width), self._launch.device.elements)
        tiles = -(-width // tile)
        tiles_pow2, grid = tile_size(tiles), (count, tiles)
        peaks, values = (torch.empty(count, tiles, dtype=torch.float64, device=self._device) for _ in range(2))
        columns = torch.empty(count, tiles, dtype=torch.int32, device=self._device)
        kernels.peak[grid](scores, peaks, width, stride, TILE=tile, **EXACT)
        cuts, lasts = rows.ints, rows.ints
        if rows.limited:
            cuts = torch.empty(3, count, dtype=torch.int64, device=self._device)
            lasts = torch.empty(2, count, dtype=torch.int32, device=self._device)
            kernels.limit[(count,)](
                scores, peaks, rows.reals, rows.ints, cuts, lasts, width, stride, count, tiles, TILES=tiles_pow2,
                TILE=tile, num_warps=8, **EXACT,
            )  # fmt: skip
        kernels.noisy[grid](
            scores, peaks, rows.reals, rows.ints, cuts, lasts, token_ids, values, columns, width, stride, count, tiles,
            number, LIMITED=rows.limited, MAPPED=mapped, TILES=tiles_pow2, TILE=tile, **EXACT,
        )  # fmt: skip
        kernels.pick[(count,)](
            values, columns, peaks, token_ids, drawn, tiles, drawn.stride(0), number, MAPPED=mapped, TILES=tiles_pow2
        )

    def _edited_scores(
        self, logits: Tensor, rows: DeviceSamplingRows, token_ids: Tensor | None, drawn: Tensor, number: int
    ) -> Tensor:
        """Scores [L, W] float64 after mask, bias and penalties."""
        count, width, mapped = rows.count, logits.shape[1], token_ids is not None
        scores = torch.empty(count, width, dtype=torch.float64, device=self._device)
        tile, mask = min(tile_size(width), self._launch.device.elements), rows.allowed
        kernels.edit[(count, -(-width // tile))](
            logits, mask, token_ids, scores, width, logits.stride(0), 0 if mask is None else mask.stride(0),
            MASKED=mask is not None, MAPPED=mapped, TILE=tile,
        )  # fmt: skip
        if rows.bias:
            kernels.bias[(count,)](scores, *rows.bias, token_ids, width, MAPPED=mapped, TILE=EDIT_TILE)
        if rows.penalties:
            kernels.penalize[(count,)](
                scores, *rows.penalties, rows.reals, drawn, token_ids, width, count, number, drawn.stride(0),
                MAPPED=mapped, TILE=EDIT_TILE, **EXACT,
            )  # fmt: skip
        return scores

    def logprobs(self, logits: Tensor, drawn: Tensor, token_ids: Tensor | None, out: Tensor, number: int = 0) -> None:
        """Write the raw log-softmax of logits [L, W] at column `number` of drawn [L, D] into that column of out [L,
        D]."""
        count, width, mapped = *logits.shape, token_ids is not None
        kernels.logprob[(count,)](
            logits, drawn, token_ids, out, width, logits.stride(0), drawn.shape[1], number, MAPPED=mapped,
            TILE=min(tile_size(width), 4 * self._launch.device.elements), **EXACT,
        )  # fmt: skip
