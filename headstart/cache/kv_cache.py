"""KV cache of an engine: block tables, prefix cache, and the spill of blocks to files."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headstart.cache.blocks import Block, BlockPool, next_key, prefix_keys, root_key
from headstart.cache.recurrent import StateCacheManager
from headstart.core import Sequence, int_array

if TYPE_CHECKING:
    from headstart.cache.spill import KVSpill

LOAD_POLL_S = 0.01  # seconds that an otherwise idle engine waits for a load before it looks for new requests


class KVCacheManager:
    """Block tables over one block pool, which the trunk (KV and hidden states) and all other networks share."""

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, states: StateCacheManager | None = None
    ) -> None:
        """states: slots of recurrent state; such a trunk's prefixes are cached up to their last snapshot."""
        self.pool, self.block_size, self.prefix_caching = BlockPool(num_blocks), block_size, prefix_caching
        self.states = states
        self.spill: KVSpill | None = None  # blocks in files
        self.receptive_fields: dict[int, int] = {}  # network -> number of earlier positions that a row reads; 0: all
        self._keys: dict[Sequence, list[bytes]] = {}  # keys of the published blocks of each live sequence

    @property
    def usage(self) -> float:
        """Share of blocks in use. Any thread may read it."""
        spare = self.spill.num_spare if self.spill else 0
        return 1 - min((self.pool.num_free + spare) / len(self.pool.blocks), 1.0)

    def blocks_for(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)

    def attach_prefix(self, sequence: Sequence) -> int:
        """Gives a sequence without blocks the cached blocks of its longest known prefix; sets num_computed and
        `filled`.

        At least one row is left to compute. Returns the number of cached positions.
        """
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
        """Sets sequence.filled: how far these blocks hold each network's KV without a gap. The KV of a network with a
        limited window may start at a later block, if the next row attends to nothing before it."""
        filled = sequence.filled
        begins: dict[int, tuple[int, int]] = {}  # network -> start of a later run, and end of the first one
        for i, block in enumerate(blocks):
            start = i * self.block_size
            for network, count in block.filled.items():
                if filled[network] == start:  # no gap so far
                    filled[network] += count
                elif self.receptive_fields.get(network):
                    end = begins[network][1] if network in begins else filled[network]
                    begins[network], filled[network] = (start, end), start + count
        for network, (begin, end) in begins.items():
            if begin > len(sequence.tokens) - self.receptive_fields[network]:
                filled[network] = end

    def _cached_blocks(self, sequence: Sequence) -> list[tuple[bytes, Block]]:
        """Keys and blocks of the longest known prefix that leaves a row to compute."""
        cached: list[tuple[bytes, Block]] = []
        for key in self.usable_keys(sequence):
            block = self.pool.find(key)
            if block is None:
                break
            cached.append((key, block))
        return cached

    def usable_keys(self, sequence: Sequence) -> Iterator[bytes]:
        """Keys of the full blocks that may come from the cache; none if every row must be computed."""
        wants_all = sequence.prompt_logprobs is not None or sequence.request.embeds
        if not self.prefix_caching or wants_all:
            return iter(())
        request = sequence.request
        return prefix_keys(sequence.tokens[:-1], request.cache_scope, self.block_size, request.images)

    def fetch(self, sequence: Sequence) -> bool:
        """Starts to load the sequence's prefix from files; False if nothing is to be loaded and it can be admitted."""
        return self.spill is not None and self.spill.fetch(sequence, list(self.usable_keys(sequence)))

    def collect(self) -> list[Sequence]:
        """Sequences that no longer wait for a load. Blocks that could not be loaded will be computed."""
        return [each for each in self.spill.collect() if not self.fetch(each)] if self.spill else []

    def attached(self, sequence: Sequence) -> None:
        """Tells the spill that the sequence is admitted."""
        if self.spill:
            self.spill.attached(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Tells the spill that the sequence will not be admitted."""
        if self.spill:
            self.spill.drop(sequence)

    @contextmanager
    def without_spill(self) -> Iterator[None]:
        """Disables the spill for measurements. No sequence may be alive before or after."""
        spill, self.spill = self.spill, None
        try:
            yield
        finally:
            self.spill = spill

    def wait(self) -> None:
        """Waits briefly if something is being loaded."""
        if self.spill:
            self.spill.wait(LOAD_POLL_S)

    def reserve(self, sequence: Sequence, num_slots: int) -> bool:
        """Extends the block table to `num_slots` positions. Returns False, and takes nothing, if blocks or slots of
        recurrent state are short."""
        if self.states and not self.states.hold(sequence):
            return False
        num_missing = self.blocks_for(num_slots) - len(sequence.block_table)
        if num_missing > self.pool.num_free and self.spill:
            self.spill.free_blocks(num_missing)
        if num_missing > self.pool.num_free:
            return False
        sequence.block_table.extend(self.pool.allocate().index for _ in range(num_missing))
        return True

    def commit(self, sequence: Sequence) -> None:
        """Publishes the blocks that computed, committed tokens have filled."""
        if not self.prefix_caching:
            return
        keys, request = self._keys.setdefault(sequence, []), sequence.request
        known = len(keys)
        while (len(keys) + 1) * self.block_size <= sequence.num_computed:
            parent = keys[-1] if keys else root_key(request.cache_scope)
            start = len(keys) * self.block_size
            key = next_key(parent, sequence.tokens, request.images, start, self.block_size)
            self.pool.publish(self._block(sequence, len(keys)), key)
            keys.append(key)
        snapshots = self.states.publish(sequence, keys) if self.states else []
        if self.spill and (len(keys) > known or snapshots):
            self.spill.save(self._published(sequence, known))
            if snapshots:
                self.spill.save_states(snapshots)

    def fill(self, sequence: Sequence, network: int, start: int, end: int) -> None:
        """Marks a network's KV as valid for positions start .. end - 1. `start` is its first invalid position, or the
        first of a block if the network needs none before it."""
        size, blocks = self.block_size, self.pool.blocks
        for i in range(start // size, -(-end // size)):
            filled, count = blocks[sequence.block_table[i]].filled, min(size, end - i * size)
            if filled.get(network, 0) < count:
                filled[network] = count
        sequence.filled[network] = end

    def unfill(self, sequences: Iterable[Sequence]) -> None:
        """Marks all KV of networks beside the trunk as invalid, in the prefix cache and in `sequences`."""
        for block in self.pool.blocks:
            block.filled.clear()
        for sequence in sequences:
            sequence.filled.clear()

    def release(self, sequence: Sequence) -> None:
        """Frees a sequence's blocks and recurrent state. A preempted sequence starts again from its cached prefix."""
        if self.spill:
            self.spill.save(self._published(sequence))
        # last block first, so that the start of a prefix is reused last
        for index in reversed(sequence.block_table):
            self.pool.release(self.pool.blocks[index])
        sequence.block_table = int_array()
        sequence.num_computed = 0
        sequence.filled.clear()
        self._keys.pop(sequence, None)
        if self.states:
            self.states.release(sequence)

    def _published(self, sequence: Sequence, first: int = 0) -> Iterator[tuple[int, bytes, Block]]:
        """Published blocks of a sequence from index `first` on: (index, key, block)."""
        keys = self._keys.get(sequence, ())
        return ((i, keys[i], self._block(sequence, i)) for i in range(first, len(keys)))

    def _block(self, sequence: Sequence, i: int) -> Block:
        return self.pool.blocks[sequence.block_table[i]]
