"""Blocks of KV slots: reference counts, and a prefix index over the content of full, committed blocks."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

ROOT = b""
"""Parent key of a sequence's first block, where it has no salt."""


def root_key(salt: str) -> bytes:
    """Parent key of a sequence's first block; longer than other keys, so that no salt is one of those."""
    return hashlib.blake2b(salt.encode(), digest_size=24).digest() if salt else ROOT


def block_key(parent: bytes, tokens: Seq[int]) -> bytes:
    """Names a full block by its tokens and everything before them (a 128-bit hash chain: collisions do not happen)."""
    content = np.asarray(tokens, dtype=np.int64).tobytes()
    return hashlib.blake2b(parent + content, digest_size=16).digest()


def keys_of(tokens: Seq[int], salt: str, size: int) -> Iterator[bytes]:
    """Of all full blocks, one after the other."""
    parent = root_key(salt)
    for start in range(0, len(tokens) - size + 1, size):
        parent = block_key(parent, tokens[start : start + size])
        yield parent


@dataclass
class Block:
    """`key` is set once the block is full of committed tokens. `filled`: of each network beside the trunk, the leading
    slots that hold its KV too (slots before its first position hold none and count as filled). `kept`: when which part
    of it was last seen to in a store (cache/spill.py)."""

    index: int
    references: int = 0
    key: bytes | None = None
    filled: dict[int, int] = field(default_factory=dict)
    kept: dict[int, float] = field(default_factory=dict)


class BlockPool:
    """Hands out blocks. A released block keeps its content and its key until it is handed out again, oldest first; one
    that cannot be found comes before all others: it is warm, and memory that was never written stays the system's."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._index: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> Block:
        """A block of our own, emptied. The caller has checked num_free."""
        index, _ = self._free.popitem(last=False)
        block = self.blocks[index]
        if block.key is not None and self._index.get(block.key) == index:
            del self._index[block.key]
        block.key, block.references = None, 1
        block.filled.clear()
        block.kept.clear()
        return block

    def find(self, key: bytes) -> Block | None:
        """The block with this content, whether in use or free."""
        index = self._index.get(key)
        return None if index is None else self.blocks[index]

    def share(self, block: Block) -> None:
        """Take one more reference to a found block."""
        if block.references == 0:
            del self._free[block.index]
        block.references += 1

    def publish(self, block: Block, key: bytes) -> None:
        """The block is full of committed tokens: others may find it. An equal block published before stays first."""
        block.key = key
        self._index.setdefault(key, block.index)

    def forget(self) -> None:
        """Nothing that was published before is found again; free blocks of it are the first to be handed out."""
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
        """Assert the invariants (tests): free means unreferenced, the index names published blocks only."""
        for block in self.blocks:
            assert (block.references == 0) == (block.index in self._free), block
        for key, index in self._index.items():
            assert self.blocks[index].key == key
