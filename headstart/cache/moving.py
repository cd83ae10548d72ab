"""What is on its way between pools and files (spill.py)."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from headstart.cache.blocks import Block
from headstart.cache.parts import Part
from headstart.cache.store import Tier
from headstart.core import Sequence

LONGEST = 30.0
"""Seconds after which nobody waits for a load any more."""


@dataclass(eq=False)
class Item:
    """One part of one block, or the state in one slot (`block` None), on its way. `when_ns`: how old it shall look."""

    number: int
    part: Part
    key: bytes
    index: int
    block: Block | None = None
    when_ns: int = 0
    known: bool = False  # it was in the store before
    cold: bool = False  # the disk was asked to read it ahead
    tier: Tier | None = None  # where it was found; None: it was not


@dataclass(eq=False)
class Load:
    """Blocks of one chain that are read for `sequences`. `keys`: of blocks[i]; those before `fresh` were there."""

    sequences: list[Sequence]
    keys: list[bytes]
    blocks: list[Block]
    fresh: int
    items: list[tuple[int, Item]]  # with the place of its block
    todo: deque[Item] = field(default_factory=deque)
    running: int = 0  # workers
    begun: float = field(default_factory=time.monotonic)
    state: int | None = None  # the slot of a state that is held

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() - self.begun > LONGEST

    @property
    def first(self) -> bytes | None:
        """The key of the first block that is read."""
        return self.keys[self.fresh] if self.fresh < len(self.keys) else None
