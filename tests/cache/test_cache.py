"""KV cache blocks against a model that remembers what was written into every slot.

A slot's content is named by the tokens up to its position, since the trunk or a head computes it from these alone.
Sequences over two tokens share prefixes often."""

from typing import Any

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule
from support import request

from headstart.cache.blocks import ROOT, BlockPool, block_key
from headstart.cache.kv_cache import KVCacheManager
from headstart.core import Sequence

SIZE, NUM_BLOCKS, MAX_LENGTH = 4, 12, 30
HEAD = 0  # the one network beside the trunk
Prefix = tuple[int, ...]


def new_sequence(tokens: list[int], **params: Any) -> Sequence:
    return Sequence(request(tokens, stops=(), **params), 0, list(tokens), 0)


class KVCacheMachine(RuleBasedStateMachine):
    """Engine steps on a few sequences in any order."""

    sequences = Bundle("sequences")
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=20)

    def __init__(self) -> None:
        super().__init__()
        self.memory = KVCacheManager(NUM_BLOCKS, SIZE)
        self.live: list[Sequence] = []
        self.trunk: dict[int, Prefix] = {}  # slot -> tokens up to its position
        self.head: dict[int, Prefix] = {}
        self.head_start = dict[Sequence, int]()  # first position filled by the head, if not the first pair
        self.junk = 0

    def slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_table[position // SIZE] * SIZE + position % SIZE

    def write(self, into: dict[int, Prefix], sequence: Sequence, positions: range, *, junk: bool = False) -> None:
        """Computes rows. Each row of a draft is junk of its own."""
        for position in positions:
            slot = self.slot(sequence, position)
            owners = [other for other in self.live if slot // SIZE in other.block_table]
            assert not junk or owners == [sequence], "a draft is written into a shared block"
            self.junk += 1
            into[slot] = (-self.junk,) if junk else tuple(sequence.tokens[: position + 1])

    @rule(target=sequences, tokens=tokens)
    def arrive(self, tokens: list[int]) -> Any:
        sequence = new_sequence(tokens)
        num_cached = self.memory.attach_prefix(sequence)
        assert num_cached == sequence.num_computed < len(tokens) and num_cached % SIZE == 0
        self.live.append(sequence)
        return sequence

    @rule(sequence=sequences, rows=st.integers(1, 9))
    def prefill(self, sequence: Sequence, rows: int) -> None:
        """Computes a chunk, never the last token."""
        end = min(sequence.num_computed + rows, len(sequence.tokens) - 1)
        before = list(sequence.block_table)
        if not self.memory.reserve(sequence, end):
            assert sequence.block_table.tolist() == before
            assert self.memory.blocks_for(end) - len(before) > self.memory.pool.num_free
            return
        self.write(self.trunk, sequence, range(sequence.num_computed, end))
        sequence.num_computed = max(end, sequence.num_computed)
        self.memory.commit(sequence)

    @rule(sequence=sequences, draft=st.integers(0, 4), new=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def decode(self, sequence: Sequence, draft: int, new: list[int]) -> None:
        """Computes all pending tokens and a draft, of which len(new) - 1 tokens are accepted."""
        new, length = new[: draft + 1], len(sequence.tokens)
        if length + draft > MAX_LENGTH or not self.memory.reserve(sequence, length + draft):
            return
        self.write(self.trunk, sequence, range(sequence.num_computed, length))
        sequence.tokens += new
        end = len(sequence.tokens) - 1
        self.write(self.trunk, sequence, range(length, end))
        self.write(self.trunk, sequence, range(end, length + draft), junk=True)
        sequence.num_computed = end
        self.memory.commit(sequence)

    @rule(sequence=sequences, depth=st.integers(1, 4), chunk=st.integers(1, 30), reach=st.integers(0, 12))
    def propose(self, sequence: Sequence, depth: int, chunk: int, reach: int) -> None:
        """The head fills true pairs in chunks, `reach` positions back (0: all), then writes drafted pairs."""
        length = len(sequence.tokens)
        if sequence.num_computed < length - 1 or not self.memory.reserve(sequence, length + depth):
            return
        start, far = max(sequence.filled[HEAD], 1), (length - reach) // SIZE * SIZE if reach else 0
        if far > start:
            start = self.head_start[sequence] = far
        while start < length:
            end = min(start + chunk, length)
            self.write(self.head, sequence, range(start, end))
            self.memory.fill(sequence, HEAD, start, end)
            start = end
        self.write(self.head, sequence, range(length, length + depth), junk=True)

    @rule(sequence=consumes(sequences))
    def finish(self, sequence: Sequence) -> None:
        self.memory.release(sequence)
        self.live.remove(sequence)
        assert not sequence.block_table

    @rule(target=sequences, sequence=consumes(sequences))
    def preempt(self, sequence: Sequence) -> Any:
        """Releases all blocks and starts again from the cached prefix."""
        self.memory.release(sequence)
        self.head_start.pop(sequence, None)
        assert (sequence.num_computed, sequence.filled[HEAD]) == (0, 0)
        self.memory.attach_prefix(sequence)
        return multiple(sequence)

    @precondition(lambda self: self.live)
    @rule()
    def finish_all(self) -> None:
        for sequence in self.live:
            self.memory.release(sequence)
        self.head_start.clear()
        for sequence in self.live:
            self.memory.attach_prefix(sequence)

    @invariant()
    def reference_counts_match_block_tables(self) -> None:
        self.memory.pool.check()
        held = [index for sequence in self.live for index in sequence.block_table]
        for sequence in self.live:
            assert len(set(sequence.block_table)) == len(sequence.block_table)
        for block in self.memory.pool.blocks:
            assert block.references == held.count(block.index)
            assert block.references < 2 or block.key is not None, "shared, but not published"
        assert self.memory.pool.num_free == NUM_BLOCKS - len(set(held))
        assert self.memory.usage == pytest.approx(len(set(held)) / NUM_BLOCKS)

    @invariant()
    def sequences_read_their_own_prefix(self) -> None:
        for sequence in self.live:
            for position in range(sequence.num_computed):
                assert self.trunk[self.slot(sequence, position)] == tuple(sequence.tokens[: position + 1])
            assert sequence.filled[HEAD] <= len(sequence.tokens)
            for position in range(self.head_start.get(sequence, 1), sequence.filled[HEAD]):
                assert self.head[self.slot(sequence, position)] == tuple(sequence.tokens[: position + 1])

    @invariant()
    def published_blocks_match_their_keys(self) -> None:
        for index in self.memory.pool._index.values():
            block = self.memory.pool.blocks[index]
            written = [self.trunk[index * SIZE + i] for i in range(SIZE)]
            prefix = written[-1]
            assert len(prefix) % SIZE == 0 and written == [prefix[: len(prefix) - SIZE + 1 + i] for i in range(SIZE)]
            key = ROOT
            for start in range(0, len(prefix), SIZE):
                key = block_key(key, list(prefix[start : start + SIZE]))
            assert key == block.key
            first = 1 if len(prefix) == SIZE else 0  # a sequence's first slot holds no pair
            for i in range(first, block.filled.get(HEAD, 0)):
                assert self.head[index * SIZE + i] == prefix[: len(prefix) - SIZE + 1 + i]

    def teardown(self) -> None:
        for sequence in self.live:
            self.memory.release(sequence)
        assert self.memory.pool.num_free == NUM_BLOCKS and not self.memory._keys
        self.memory.pool.check()


TestKVCache = KVCacheMachine.TestCase
TestKVCache.settings = settings(max_examples=60, stateful_step_count=40)


def computed_sequence(memory: KVCacheManager, tokens: list[int], num_computed: int) -> Sequence:
    sequence = new_sequence(tokens)
    memory.attach_prefix(sequence)
    assert memory.reserve(sequence, len(tokens))
    sequence.num_computed = num_computed
    memory.commit(sequence)
    return sequence


def test_prefix_hit_leaves_the_last_row_to_compute() -> None:
    memory, tokens = KVCacheManager(8, SIZE), list(range(8))
    first = computed_sequence(memory, [*tokens, 9], 8)
    assert num_cached(memory, tokens) == 4  # all 8 tokens are cached, but the last row must be computed
    third = new_sequence([*tokens, 1])
    assert memory.attach_prefix(third) == 8 and third.block_table == first.block_table[:2]
    assert num_cached(memory, [9, 9, 9, 9, 4, 5, 6, 7, 9]) == 0, "a block after other tokens is a hit"


def num_cached(memory: KVCacheManager, tokens: list[int], **params: Any) -> int:
    return memory.attach_prefix(new_sequence(tokens, **params))


def test_uncomputed_tokens_are_not_published() -> None:
    memory = KVCacheManager(8, SIZE)
    computed_sequence(memory, list(range(9)), 7)
    assert num_cached(memory, list(range(9))) == 4


def test_released_blocks_are_found_until_reused() -> None:
    memory = KVCacheManager(4, SIZE)
    memory.release(computed_sequence(memory, list(range(13)), 12))
    assert memory.pool.num_free == 4
    again = new_sequence(list(range(13)))
    assert memory.attach_prefix(again) == 12
    memory.release(again)
    assert memory.reserve(new_sequence([5] * 5), 2 * SIZE)  # takes the unused block and the prefix's end
    assert num_cached(memory, list(range(13))) == 8


def test_reserve_allocates_all_blocks_or_none() -> None:
    memory, sequence = KVCacheManager(4, SIZE), new_sequence([1])
    assert not memory.reserve(sequence, 4 * SIZE + 1) and memory.pool.num_free == 4
    assert not sequence.block_table and memory.reserve(sequence, 4 * SIZE) and memory.reserve(sequence, 1)
    assert memory.pool.num_free == 0


def test_drafter_fill_stops_at_the_first_gap() -> None:
    memory = KVCacheManager(8, SIZE)
    memory.fill(computed_sequence(memory, list(range(13)), 12), HEAD, 1, 6)
    second = new_sequence(list(range(13)))
    memory.attach_prefix(second)
    assert (second.num_computed, second.filled[HEAD]) == (12, 6) and memory.reserve(second, 13)
    memory.fill(second, HEAD, 6, 13)
    third = new_sequence([*range(12), 99])
    memory.attach_prefix(third)
    assert (third.num_computed, third.filled[HEAD]) == (12, 12)


def test_gap_outside_the_receptive_field_is_ignored() -> None:
    memory = KVCacheManager(8, SIZE)
    memory.receptive_fields[HEAD] = 5
    first = computed_sequence(memory, list(range(13)), 12)
    memory.fill(first, HEAD, 4, 13)

    def filled(length: int = 13) -> int:
        again = new_sequence(list(range(length)))
        memory.attach_prefix(again)
        return again.filled[HEAD]

    for length, expected in ((13, 12), (9, 8), (8, 0)):  # of 8 tokens, the head's keys of the first block are missing
        assert filled(length) == expected
    memory.fill(first, HEAD, 1, 4)  # as far as another sequence filled
    memory.receptive_fields[HEAD] = 2
    memory.pool.blocks[first.block_table[1]].filled.clear()
    assert filled() == 12, "the last block covers the head's receptive field"
    memory.receptive_fields[HEAD] = 6
    assert filled() == 4, "only the first block is complete"
    memory.pool.blocks[first.block_table[0]].filled.clear()
    memory.receptive_fields[HEAD] = 0
    assert filled() == 0


def test_reused_block_resets_the_drafter_fill() -> None:
    memory = KVCacheManager(3, SIZE)
    first = computed_sequence(memory, list(range(9)), 8)
    memory.fill(first, HEAD, 1, 9)
    memory.release(first)
    second = computed_sequence(memory, [7] * 9, 8)
    memory.release(second)
    assert memory.attach_prefix(second) == 8 and second.filled[HEAD] == 0


def test_cleared_blocks_are_found_only_after_being_published_again() -> None:
    memory = KVCacheManager(NUM_BLOCKS, SIZE)
    for forgets, expected in ((False, 0), (False, 4), (True, 0), (False, 4)):
        if forgets:
            memory.pool.clear()
        sequence = new_sequence([1, 2, 3, 4, 5])
        assert memory.attach_prefix(sequence) == expected and memory.reserve(sequence, 5)
        sequence.num_computed = 4
        memory.commit(sequence)
        memory.release(sequence)
        memory.pool.check()


@pytest.mark.parametrize("caching", [False, True])
def test_no_hits_with_caching_disabled_or_prompt_logprobs(caching: bool) -> None:
    memory = KVCacheManager(8, SIZE, prefix_caching=caching)
    computed_sequence(memory, list(range(9)), 8)
    assert num_cached(memory, list(range(9)), prompt_logprobs=1 if caching else None) == 0


def test_blocks_published_twice_stay_separate() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(), pool.allocate()
    for block in (a, b):
        pool.publish(block, b"same")
    assert pool.find(b"same") is a
    pool.release(b)
    pool.release(a)
    pool.check()
    assert {pool.allocate().index for _ in range(3)} == {0, 1, 2} and pool.find(b"same") is None


def test_unpublished_blocks_are_allocated_first() -> None:
    """A pool that is never full leaves the rest of its memory unwritten."""
    pool = BlockPool(4)
    kept, twin, empty = (pool.allocate() for _ in range(3))
    for block in (kept, twin):
        pool.publish(block, b"same")
    for block in (kept, twin, empty):
        pool.release(block)
    assert [pool.allocate().index for _ in range(4)] == [empty.index, twin.index, 3, kept.index]


def test_cleared_blocks_are_allocated_before_unwritten_ones() -> None:
    memory = KVCacheManager(NUM_BLOCKS, SIZE)
    sequence = computed_sequence(memory, list(range(9)), 8)
    written = set(sequence.block_table)
    memory.release(sequence)
    memory.pool.clear()
    assert {memory.pool.allocate().index for _ in written} == written
    memory.pool.check()
