"""KV blocks: reference counts, a prefix index over full blocks, and the parts of a block that are stored together."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from headstart.core import PlacedImage
from headstart.kernels.ops import Backend, Pool

ROOT = b""  # parent key of a sequence's first block without an adapter or a cache salt


def root_key(scope: str) -> bytes:
    """Parent key of a sequence's first block. scope: Request.cache_scope. Hashed roots are longer than other keys, so
    they never equal one."""
    return hashlib.blake2b(scope.encode(), digest_size=24).digest() if scope else ROOT


def block_key(parent: bytes, tokens: Seq[int]) -> bytes:
    """Key of a full block: hash of its tokens and all before them (128-bit chain, where collisions do not occur)."""
    content = np.asarray(tokens, dtype=np.int64).tobytes()
    return hashlib.blake2b(parent + content, digest_size=16).digest()


def next_key(parent: bytes, tokens: Seq[int], images: Seq[PlacedImage], start: int, size: int) -> bytes:
    """Key of the block at positions start .. start + size - 1 of a text, with the digests of images that begin there.
    parent: key of the block before it."""
    inside = [each for each in images if start <= each.first < start + size]
    digests = b"".join(each.first.to_bytes(8, "little") + each.image.digest for each in inside)
    return block_key(parent + digests, tokens[start : start + size])


def prefix_keys(tokens: Seq[int], scope: str, size: int, images: Seq[PlacedImage] = ()) -> Iterator[bytes]:
    """Keys of all full blocks of a prompt, in order."""
    parent = root_key(scope)
    for start in range(0, len(tokens) - size + 1, size):
        parent = next_key(parent, tokens, images, start, size)
        yield parent


@dataclass
class Block:
    """One KV block."""

    index: int
    references: int = 0
    key: bytes | None = None  # set when the block is full of committed tokens
    # network beside the trunk -> leading slots with its KV (slots before its first position count)
    filled: dict[int, int] = field(default_factory=dict)
    # block part -> time when it was last known to be in the store (cache/spill.py)
    stored_at: dict[int, float] = field(default_factory=dict)


class BlockPool:
    """Allocates blocks. A released block keeps content and key until it is reused, oldest first.

    Free blocks without a findable key are reused before others, most recently used first: their memory is still in the
    processor's caches, and the system has not yet allocated memory that was never written.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._index: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Block:
        """An empty block with one reference. The caller has checked `num_free`."""
        index, _ = self._free.popitem(last=False)
        block = self.blocks[index]
        if block.key is not None and self._index.get(block.key) == index:
            del self._index[block.key]
        block.key, block.references = None, 1
        block.filled.clear()
        block.stored_at.clear()
        return block

    def find(self, key: bytes) -> Block | None:
        """The block with this content, in use or free; None if there is none."""
        index = self._index.get(key)
        return None if index is None else self.blocks[index]

    def share(self, block: Block) -> None:
        """Adds a reference to a found block."""
        if block.references == 0:
            del self._free[block.index]
        block.references += 1

    def publish(self, block: Block, key: bytes) -> None:
        """Enters a full block into the prefix index. `find` returns an equal block that was published earlier."""
        block.key = key
        self._index.setdefault(key, block.index)

    def clear(self) -> None:
        """Empties the prefix index; its free blocks are reused first."""
        for index in self._index.values():
            if index in self._free:
                self._free.move_to_end(index, last=False)
        self._index.clear()

    def release(self, block: Block) -> None:
        assert block.references > 0
        block.references -= 1
        if block.references == 0:
            self._free[block.index] = None
            if block.key is None or self._index.get(block.key) != block.index:
                self._free.move_to_end(block.index, last=False)

    def check(self) -> None:
        """Asserts the invariants (tests): free blocks are unreferenced, and the index has published blocks only."""
        for block in self.blocks:
            assert (block.references == 0) == (block.index in self._free), block
        for key, index in self._index.items():
            assert self.blocks[index].key == key


TRUNK, STATE = -1, -2
"""Part numbers of the trunk's KV and hidden states, and of recurrent state; a network's part has its own index."""


@dataclass(frozen=True, eq=False)
class BlockPart:
    """The part of a block that is stored as one file: `slots` slots of each pool, or one recurrent state."""

    name: str  # 32 hex digits: digest of version, backend, weights and configuration (engine/build.py)
    backend: Backend
    pools: Seq[Pool]
    slots: int

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of one item, by pool."""
        return [len(piece) for piece in self.read(0)]

    @cached_property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    def read(self, index: int) -> list[NDArray[np.uint8]]:
        """Bytes of item `index` by pool, possibly views of the pools."""
        return [self.backend.read_slots(pool, index * self.slots, self.slots) for pool in self.pools]

    def write(self, index: int, content: NDArray[np.uint8]) -> None:
        """Writes an item's bytes to the pools."""
        for pool, size in zip(self.pools, self.sizes, strict=True):
            self.backend.write_slots(pool, index * self.slots, content[:size])
            content = content[size:]
