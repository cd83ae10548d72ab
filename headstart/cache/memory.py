"""Reserve, commit, release: which blocks a sequence holds, and what of a prompt is already computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headstart.cache.blocks import Block, BlockPool, block_key, keys_of, root_key
from headstart.cache.recurrent import StateMemory
from headstart.core import Sequence, int_array

if TYPE_CHECKING:
    from headstart.cache.spill import Spill

A_MOMENT = 0.01
"""Seconds that an engine without other work waits for a load, before it looks for something new to do."""


class KVMemory:
    """Block tables of sequences over one pool; KV and hidden states of the trunk, and KV of all networks beside it,
    share them. `states`: of a trunk with recurrent layers, whose prefixes are known as far as a snapshot goes."""

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, states: StateMemory | None = None
    ) -> None:
        self.pool, self.block_size, self.prefix_caching = BlockPool(num_blocks), block_size, prefix_caching
        self.states = states
        self.spill: Spill | None = None  # what is beyond the pool
        self.reaches: dict[int, int] = {}  # of networks beside the trunk: the positions back that they need; 0: all
        self._keys: dict[Sequence, list[bytes]] = {}  # keys of the published blocks of each live sequence

    @property
    def usage(self) -> float:
        """Share of blocks that are in use. Also for other threads."""
        spare = self.spill.num_spare if self.spill else 0
        return 1 - min((self.pool.num_free + spare) / len(self.pool.blocks), 1.0)

    def blocks_for(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)

    def attach_prefix(self, sequence: Sequence) -> int:
        """Give a sequence without blocks the cached blocks of its longest known prefix; sets num_computed and `filled`.
        At least one row stays to be computed. Returns the number of cached positions."""
        assert not sequence.block_table
        self._keys[sequence] = []
        cached = self._cached_blocks(sequence)
        if self.states:
            cached = cached[: self.states.attach(sequence, [key for key, _ in cached])]
        self._attach_filled(sequence, [block for _, block in cached])
        for key, block in cached:
            self.pool.share(block)
            sequence.block_table.append(block.index)
            self._keys[sequence].append(key)
            sequence.num_computed += self.block_size
        return sequence.num_computed

    def _attach_filled(self, sequence: Sequence, blocks: Iterable[Block]) -> None:
        """What networks beside the trunk have of these blocks, from the first on, or as far back as they reach."""
        filled = sequence.filled
        begins: dict[int, tuple[int, int]] = {}  # where a later run begins; what was whole before
        for i, block in enumerate(blocks):
            start = i * self.block_size
            for network, count in block.filled.items():
                if filled[network] == start:  # whole so far
                    filled[network] += count
                elif self.reaches.get(network):
                    whole = begins[network][1] if network in begins else filled[network]
                    begins[network], filled[network] = (start, whole), start + count
        for network, (begin, whole) in begins.items():
            if begin > len(sequence.tokens) - self.reaches[network]:
                filled[network] = whole

    def _cached_blocks(self, sequence: Sequence) -> list[tuple[bytes, Block]]:
        """Keys and blocks of the longest known prefix that leaves a row to be computed."""
        cached: list[tuple[bytes, Block]] = []
        for key in self.prefix_keys(sequence):
            block = self.pool.find(key)
            if block is None:
                break
            cached.append((key, block))
        return cached

    def prefix_keys(self, sequence: Sequence) -> Iterator[bytes]:
        """Of the full blocks that leave a row to be computed; none where all rows shall be."""
        wants_all = sequence.prompt_logprobs is not None or sequence.request.embeds
        if not self.prefix_caching or wants_all:
            return iter(())
        return keys_of(sequence.tokens[:-1], sequence.request.cache_salt, self.block_size)

    def fetch(self, sequence: Sequence) -> bool:
        """Begin to load what is known of its prefix beyond the pool; False where nothing is: it can be admitted."""
        return self.spill is not None and self.spill.fetch(sequence, list(self.prefix_keys(sequence)))

    def collect(self) -> list[Sequence]:
        """Sequences whose prefixes have been loaded, as far as they could be."""
        return [each for each in self.spill.collect() if not self.fetch(each)] if self.spill else []

    def attached(self, sequence: Sequence) -> None:
        """It is admitted."""
        if self.spill:
            self.spill.attached(sequence)

    def drop(self, sequence: Sequence) -> None:
        """It will not be admitted."""
        if self.spill:
            self.spill.drop(sequence)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Meanwhile nothing is beyond the pool: measurements mean to compute. No sequence lives before or after."""
        spill, self.spill = self.spill, None
        try:
            yield
        finally:
            self.spill = spill

    def wait(self) -> None:
        """A moment, where something is being loaded."""
        if self.spill:
            self.spill.wait(A_MOMENT)

    def reserve(self, sequence: Sequence, num_slots: int) -> bool:
        """Make the sequence's table cover `num_slots` positions; False (no block taken) when blocks, or slots of
        recurrent state, are short."""
        if self.states and not self.states.hold(sequence):
            return False
        missing = self.blocks_for(num_slots) - len(sequence.block_table)
        if missing > self.pool.num_free and self.spill:
            self.spill.relieve(missing)
        if missing > self.pool.num_free:
            return False
        sequence.block_table.extend(self.pool.allocate().index for _ in range(missing))
        return True

    def commit(self, sequence: Sequence) -> None:
        """Publish the blocks that the computed, committed tokens have filled."""
        if not self.prefix_caching:
            return
        keys = self._keys.setdefault(sequence, [])
        known = len(keys)
        while (len(keys) + 1) * self.block_size <= sequence.num_computed:
            start = len(keys) * self.block_size
            parent = keys[-1] if keys else root_key(sequence.request.cache_salt)
            key = block_key(parent, sequence.tokens[start : start + self.block_size])
            self.pool.publish(self._block(sequence, len(keys)), key)
            keys.append(key)
        snapshots = self.states.publish(sequence, keys) if self.states else []
        if self.spill and (len(keys) > known or snapshots):
            self.spill.save(self._chain(sequence, known))
            if snapshots:
                self.spill.save_states(snapshots)

    def fill(self, sequence: Sequence, network: int, start: int, end: int) -> None:
        """The KV of a network beside the trunk is now valid for positions start .. end - 1. `start`: the first that was
        not, or the first of a block, where it needs none of those before."""
        size, blocks = self.block_size, self.pool.blocks
        for i in range(start // size, -(-end // size)):
            filled, count = blocks[sequence.block_table[i]].filled, min(size, end - i * size)
            if filled.get(network, 0) < count:
                filled[network] = count
        sequence.filled[network] = end

    def unfill(self, sequences: Iterable[Sequence]) -> None:
        """What networks beside the trunk have stored is void, for these sequences (all that hold blocks) and in the
        prefix cache."""
        for block in self.pool.blocks:
            block.filled.clear()
        for sequence in sequences:
            sequence.filled.clear()

    def release(self, sequence: Sequence) -> None:
        """Give everything back; a preempted sequence starts again from its (possibly cached) prefix."""
        if self.spill:
            self.spill.save(self._chain(sequence))
        # last blocks first, so that the front of a prefix survives longest
        for index in reversed(sequence.block_table):
            self.pool.release(self.pool.blocks[index])
        sequence.block_table = int_array()
        sequence.num_computed = 0
        sequence.filled.clear()
        self._keys.pop(sequence, None)
        if self.states:
            self.states.release(sequence)

    def _chain(self, sequence: Sequence, first: int = 0) -> Iterator[tuple[int, bytes, Block]]:
        """Its published blocks from one on, with their places and keys."""
        keys = self._keys.get(sequence, ())
        return ((i, keys[i], self._block(sequence, i)) for i in range(first, len(keys)))

    def _block(self, sequence: Sequence, i: int) -> Block:
        return self.pool.blocks[sequence.block_table[i]]
