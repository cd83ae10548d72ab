"""Cosines and sines of rotary embeddings, and other factors of positions, as tables by position.

A table is made on the host in float64, in pieces of fixed places, and grows by doubling: what stands at a position
depends on the position alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from headstart.kernels.specs import RopeSpec, TemperSpec

PIECE = 1024
"""Positions of a piece."""


class Angles:
    """Tables on one device. `version` counts how often one was replaced: what was recorded with it must go then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[RopeSpec | TemperSpec, tuple[Tensor, ...]] = {}
        self._rows = PIECE
        self.version = 0

    def cover(self, last: int) -> None:
        """Have rows up to position `last`."""
        if last >= self._rows:
            while self._rows <= last:
                self._rows *= 2
            self._tables.clear()
            self.version += 1

    def table(self, spec: RopeSpec) -> tuple[Tensor, ...]:
        """Cosines and sines [positions, rotary_dim / 2], times the scale."""
        frequencies = np.array(spec.inv_freq, np.float64)

        def piece(positions: np.ndarray) -> tuple[np.ndarray, ...]:
            angles = positions[:, None] * frequencies
            return np.cos(angles) * spec.scale, np.sin(angles) * spec.scale

        return self._table(spec, piece)

    def factors(self, spec: TemperSpec) -> Tensor:
        """What queries are multiplied by, [positions]."""

        def piece(positions: np.ndarray) -> tuple[np.ndarray, ...]:
            steps = np.floor_divide(positions + spec.ahead, spec.every)
            return (1 + spec.strength * np.log1p(steps),)

        return self._table(spec, piece)[0]

    def _table(
        self, spec: RopeSpec | TemperSpec, piece: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    ) -> tuple[Tensor, ...]:
        if spec not in self._tables:
            parts = [piece(np.arange(begin, begin + PIECE, dtype=np.float64)) for begin in range(0, self._rows, PIECE)]
            columns = (np.concatenate(part).astype(np.float32) for part in zip(*parts, strict=True))
            self._tables[spec] = tuple(torch.from_numpy(column).to(self._device) for column in columns)
        return self._tables[spec]
