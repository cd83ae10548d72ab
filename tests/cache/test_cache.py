"""Blocks and memory against a model that remembers what was written into every slot.

A slot's content is named by the tokens up to its position: what a trunk (or a head) computed there depends on nothing
else. Sequences over two tokens share prefixes all the time.
"""

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


class MemoryMachine(RuleBasedStateMachine):
    """Steps of the engine on a few sequences, in any order."""

    sequences = Bundle("sequences")
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=20)

    def __init__(self) -> None:
        super().__init__()
        self.memory = KVCacheManager(NUM_BLOCKS, SIZE)
        self.live: list[Sequence] = []
        self.trunk: dict[int, Prefix] = {}  # slot -> what it holds
        self.head: dict[int, Prefix] = {}
        self.begins = dict[Sequence, int]()  # where what the head holds of a sequence begins, if not at its first pair
        self.junk = 0

    def slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_table[position // SIZE] * SIZE + position % SIZE

    def write(self, into: dict[int, Prefix], sequence: Sequence, positions: range, *, junk: bool = False) -> None:
        """Compute rows. Rows of drafts are junk, each of its own kind."""
        for position in positions:
            slot = self.slot(sequence, position)
            owners = [other for other in self.live if slot // SIZE in other.block_table]
            assert not junk or owners == [sequence], "a draft is written into a block that others read"
            self.junk += 1
            into[slot] = (-self.junk,) if junk else tuple(sequence.tokens[: position + 1])

    @rule(target=sequences, tokens=tokens)
    def arrive(self, tokens: list[int]) -> Any:
        sequence = new_sequence(tokens)
        cached = self.memory.attach_prefix(sequence)
        assert cached == sequence.num_computed < len(tokens) and cached % SIZE == 0
        self.live.append(sequence)
        return sequence

    @rule(sequence=sequences, rows=st.integers(1, 9))
    def prefill(self, sequence: Sequence, rows: int) -> None:
        """A chunk that leaves the last token to be computed."""
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
        """Compute all that is pending and a draft, of which len(new) - 1 tokens are accepted."""
        new, length = new[: draft + 1], len(sequence.tokens)
        if length + draft > MAX_LENGTH or not self.memory.reserve(sequence, length + draft):
            return
        self.write(self.trunk, sequence, range(sequence.num_computed, length))
        sequence.tokens += new
        computed = len(sequence.tokens) - 1
        self.write(self.trunk, sequence, range(length, computed))
        self.write(self.trunk, sequence, range(computed, length + draft), junk=True)
        sequence.num_computed = computed
        self.memory.commit(sequence)

    @rule(sequence=sequences, depth=st.integers(1, 4), chunk=st.integers(1, 30), reach=st.integers(0, 12))
    def propose(self, sequence: Sequence, depth: int, chunk: int, reach: int) -> None:
        """The head fills true pairs, in chunks, as far back as it reaches (0: all), then writes guesses after them."""
        length = len(sequence.tokens)
        if sequence.num_computed < length - 1 or not self.memory.reserve(sequence, length + depth):
            return
        start, far = max(sequence.filled[HEAD], 1), (length - reach) // SIZE * SIZE if reach else 0
        if far > start:
            start = self.begins[sequence] = far
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
        """Give all back and start again from what is still cached."""
        self.memory.release(sequence)
        self.begins.pop(sequence, None)
        assert (sequence.num_computed, sequence.filled[HEAD]) == (0, 0)
        self.memory.attach_prefix(sequence)
        return multiple(sequence)

    @precondition(lambda self: self.live)
    @rule()
    def finish_all(self) -> None:
        for sequence in self.live:
            self.memory.release(sequence)
        self.begins.clear()
        for sequence in self.live:
            self.memory.attach_prefix(sequence)

    @invariant()
    def references_are_right(self) -> None:
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
    def sequences_read_their_own_past(self) -> None:
        for sequence in self.live:
            for position in range(sequence.num_computed):
                assert self.trunk[self.slot(sequence, position)] == tuple(sequence.tokens[: position + 1])
            assert sequence.filled[HEAD] <= len(sequence.tokens)
            for position in range(self.begins.get(sequence, 1), sequence.filled[HEAD]):
                assert self.head[self.slot(sequence, position)] == tuple(sequence.tokens[: position + 1])

    @invariant()
    def published_blocks_hold_what_they_say(self) -> None:
        for index in self.memory.pool._index.values():
            block = self.memory.pool.blocks[index]
            written = [self.trunk[index * SIZE + i] for i in range(SIZE)]
            prefix = written[-1]
            assert len(prefix) % SIZE == 0 and written == [prefix[: len(prefix) - SIZE + 1 + i] for i in range(SIZE)]
            key = ROOT
            for start in range(0, len(prefix), SIZE):
                key = block_key(key, list(prefix[start : start + SIZE]))
            assert key == block.key
            first = 1 if len(prefix) == SIZE else 0  # no pair lives in a sequence's first slot
            for i in range(first, block.filled.get(HEAD, 0)):
                assert self.head[index * SIZE + i] == prefix[: len(prefix) - SIZE + 1 + i]

    def teardown(self) -> None:
        for sequence in self.live:
            self.memory.release(sequence)
        assert self.memory.pool.num_free == NUM_BLOCKS and not self.memory._keys
        self.memory.pool.check()


TestMemory = MemoryMachine.TestCase
TestMemory.settings = settings(max_examples=60, stateful_step_count=40)


def computed(memory: KVCacheManager, tokens: list[int], num_computed: int) -> Sequence:
    sequence = new_sequence(tokens)
    memory.attach_prefix(sequence)
    assert memory.reserve(sequence, len(tokens))
    sequence.num_computed = num_computed
    memory.commit(sequence)
    return sequence


def test_prefix_hit_leaves_one_row() -> None:
    memory, tokens = KVCacheManager(8, SIZE), list(range(8))
    first = computed(memory, [*tokens, 9], 8)
    assert cached(memory, tokens) == 4  # all 8 are cached, but the last row must be computed
    third = new_sequence([*tokens, 1])
    assert memory.attach_prefix(third) == 8 and third.block_table == first.block_table[:2]
    assert cached(memory, [9, 9, 9, 9, 4, 5, 6, 7, 9]) == 0, "a different past is no hit"


def cached(memory: KVCacheManager, tokens: list[int], **params: Any) -> int:
    return memory.attach_prefix(new_sequence(tokens, **params))


def test_uncomputed_tokens_are_not_published() -> None:
    memory = KVCacheManager(8, SIZE)
    computed(memory, list(range(9)), 7)
    assert cached(memory, list(range(9))) == 4


def test_released_blocks_are_found_until_taken() -> None:
    memory = KVCacheManager(4, SIZE)
    memory.release(computed(memory, list(range(13)), 12))
    assert memory.pool.num_free == 4
    again = new_sequence(list(range(13)))
    assert memory.attach_prefix(again) == 12
    memory.release(again)
    assert memory.reserve(new_sequence([5] * 5), 2 * SIZE)  # takes the unused block and the prefix's end, not its front
    assert cached(memory, list(range(13))) == 8


def test_reserve_takes_all_or_nothing() -> None:
    memory, sequence = KVCacheManager(4, SIZE), new_sequence([1])
    assert not memory.reserve(sequence, 4 * SIZE + 1) and memory.pool.num_free == 4
    assert not sequence.block_table and memory.reserve(sequence, 4 * SIZE) and memory.reserve(sequence, 1)
    assert memory.pool.num_free == 0


def test_drafter_fill_stops_at_the_first_hole() -> None:
    memory = KVCacheManager(8, SIZE)
    memory.fill(computed(memory, list(range(13)), 12), HEAD, 1, 6)
    second = new_sequence(list(range(13)))
    memory.attach_prefix(second)
    assert (second.num_computed, second.filled[HEAD]) == (12, 6) and memory.reserve(second, 13)
    memory.fill(second, HEAD, 6, 13)
    third = new_sequence([*range(12), 99])
    memory.attach_prefix(third)
    assert (third.num_computed, third.filled[HEAD]) == (12, 12)


def test_a_hole_further_back_than_a_drafter_reaches_is_none() -> None:
    memory = KVCacheManager(8, SIZE)
    memory.receptive_fields[HEAD] = 5
    first = computed(memory, list(range(13)), 12)
    memory.fill(first, HEAD, 4, 13)

    def filled(length: int = 13) -> int:
        again = new_sequence(list(range(length)))
        memory.attach_prefix(again)
        return again.filled[HEAD]

    for length, expected in ((13, 12), (9, 8), (8, 0)):  # of 8 tokens, the keys of the first block are missing
        assert filled(length) == expected
    memory.fill(first, HEAD, 1, 4)  # another sequence's, as far as it went
    memory.receptive_fields[HEAD] = 2
    memory.pool.blocks[first.block_table[1]].filled.clear()
    assert filled() == 12, "the last block is all that it needs"
    memory.receptive_fields[HEAD] = 6
    assert filled() == 4, "the first block is whole, the second is not"
    memory.pool.blocks[first.block_table[0]].filled.clear()
    memory.receptive_fields[HEAD] = 0
    assert filled() == 0


def test_a_block_taken_again_forgets_the_drafter() -> None:
    memory = KVCacheManager(3, SIZE)
    first = computed(memory, list(range(9)), 8)
    memory.fill(first, HEAD, 1, 9)
    memory.release(first)
    second = computed(memory, [7] * 9, 8)
    memory.release(second)
    assert memory.attach_prefix(second) == 8 and second.filled[HEAD] == 0


def test_what_is_forgotten_is_not_found_until_it_is_published_again() -> None:
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
def test_neither_a_cache_switched_off_nor_prompt_logprobs_find_anything(caching: bool) -> None:
    memory = KVCacheManager(8, SIZE, prefix_caching=caching)
    computed(memory, list(range(9)), 8)
    assert cached(memory, list(range(9)), prompt_logprobs=1 if caching else None) == 0


def test_equal_blocks_published_twice_stay_apart() -> None:
    pool = BlockPool(3)
    a, b = pool.allocate(), pool.allocate()
    for block in (a, b):
        pool.publish(block, b"same")
    assert pool.find(b"same") is a
    pool.release(b)
    pool.release(a)
    pool.check()
    assert {pool.allocate().index for _ in range(3)} == {0, 1, 2} and pool.find(b"same") is None


def test_blocks_that_nobody_can_find_are_taken_first() -> None:
    """A pool of which little is needed leaves the rest of its memory unwritten."""
    pool = BlockPool(4)
    kept, twin, empty = (pool.allocate() for _ in range(3))
    for block in (kept, twin):
        pool.publish(block, b"same")
    for block in (kept, twin, empty):
        pool.release(block)
    assert [pool.allocate().index for _ in range(4)] == [empty.index, twin.index, 3, kept.index]


def test_forgotten_blocks_are_taken_before_those_never_written() -> None:
    memory = KVCacheManager(NUM_BLOCKS, SIZE)
    sequence = computed(memory, list(range(9)), 8)
    written = set(sequence.block_table)
    memory.release(sequence)
    memory.pool.clear()
    assert {memory.pool.allocate().index for _ in written} == written
    memory.pool.check()
