"""What of a block is stored together, and under which name: the trunk's keys, values and hidden states; the keys and
values of each network beside it; a recurrent state."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headstart.kernels.ops import Backend, Pool

TRUNK, STATE = -1, -2
"""Numbers of parts; those of networks beside the trunk are their own (Sequence.filled)."""


@dataclass(frozen=True, eq=False)
class Part:
    """`name`: 32 hex digits, of all that the bits depend on beside the tokens. An item is `slots` slots of each pool: a
    block, or one recurrent state."""

    name: str
    backend: Backend
    pools: Seq[Pool]
    slots: int

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of an item, by pool."""
        return [len(piece) for piece in self.read(0)]

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    def read(self, index: int) -> list[NDArray[np.uint8]]:
        """The bytes of an item, by pool; perhaps views of the pools."""
        return [self.backend.read_slots(pool, index * self.slots, self.slots) for pool in self.pools]

    def write(self, index: int, content: NDArray[np.uint8]) -> None:
        """Put the bytes of an item into its place."""
        for pool, size in zip(self.pools, self.sizes, strict=True):
            self.backend.write_slots(pool, index * self.slots, content[:size])
            content = content[size:]
