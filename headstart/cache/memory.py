"""Reserve, commit, release: which blocks a sequence holds, and what of a prompt is already computed."""

from __future__ import annotations

from collections.abc import Iterable

from headstart.cache.blocks import Block, BlockPool, block_key, root_key
from headstart.cache.recurrent import StateMemory
from headstart.core import Sequence, int_array


class KVMemory:
    """Block tables of sequences over one pool; KV and hidden states of the trunk, and KV of all networks beside it,
    share them. `states`: of a trunk with recurrent layers, whose prefixes are known as far as a snapshot goes."""

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, states: StateMemory | None = None
    ) -> None:
        self.pool, self.block_size, self.prefix_caching = BlockPool(num_blocks), block_size, prefix_caching
        self.states = states
        self._keys: dict[Sequence, list[bytes]] = {}  # keys of the published blocks of each live sequence

    @property
    def usage(self) -> float:
        """Share of blocks that are referenced."""
        return 1 - self.pool.num_free / len(self.pool.blocks)

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
        filled = sequence.filled
        for key, block in cached:
            self.pool.share(block)
            sequence.block_table.append(block.index)
            self._keys[sequence].append(key)
            for network, count in block.filled.items():
                if filled[network] == sequence.num_computed:  # whole so far
                    filled[network] += count
            sequence.num_computed += self.block_size
        return sequence.num_computed

    def _cached_blocks(self, sequence: Sequence) -> list[tuple[bytes, Block]]:
        """Keys and blocks of the longest known prefix that leaves a row to be computed."""
        cached: list[tuple[bytes, Block]] = []
        wants_all = sequence.prompt_logprobs is not None or sequence.request.embeds
        if not self.prefix_caching or wants_all:
            return cached
        parent = root_key(sequence.request.cache_salt)
        for start in range(0, len(sequence.tokens) - self.block_size, self.block_size):
            parent = block_key(parent, sequence.tokens[start : start + self.block_size])
            block = self.pool.find(parent)
            if block is None:
                break
            cached.append((parent, block))
        return cached

    def reserve(self, sequence: Sequence, num_slots: int) -> bool:
        """Make the sequence's table cover `num_slots` positions; False (no block taken) when blocks, or slots of
        recurrent state, are short."""
        if self.states and not self.states.hold(sequence):
            return False
        missing = self.blocks_for(num_slots) - len(sequence.block_table)
        if missing > self.pool.num_free:
            return False
        sequence.block_table.extend(self.pool.allocate().index for _ in range(missing))
        return True

    def commit(self, sequence: Sequence) -> None:
        """Publish the blocks that the computed, committed tokens have filled."""
        if not self.prefix_caching:
            return
        keys = self._keys.setdefault(sequence, [])
        while (len(keys) + 1) * self.block_size <= sequence.num_computed:
            start = len(keys) * self.block_size
            parent = keys[-1] if keys else root_key(sequence.request.cache_salt)
            key = block_key(parent, sequence.tokens[start : start + self.block_size])
            self.pool.publish(self._block(sequence, len(keys)), key)
            keys.append(key)
        if self.states:
            self.states.publish(sequence, keys)

    def fill(self, sequence: Sequence, network: int, end: int) -> None:
        """The KV of a network beside the trunk is now valid below position `end`."""
        size, blocks = self.block_size, self.pool.blocks
        for i in range(sequence.filled[network] // size, -(-end // size)):
            filled, count = blocks[sequence.block_table[i]].filled, min(size, end - i * size)
            if filled[network] < count:
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
        # last blocks first, so that the front of a prefix survives longest
        for index in reversed(sequence.block_table):
            self.pool.release(self.pool.blocks[index])
        sequence.block_table = int_array()
        sequence.num_computed = 0
        sequence.filled.clear()
        self._keys.pop(sequence, None)
        if self.states:
            self.states.release(sequence)

    def _block(self, sequence: Sequence, i: int) -> Block:
        return self.pool.blocks[sequence.block_table[i]]
