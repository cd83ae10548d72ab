"""Moves KV blocks between pools and files (--kv-spill): saves in the background, loads while a request waits.

Public methods run in the engine's thread, which alone changes reference counts and publishes blocks. Worker threads
copy bytes between files and blocks held for them, and return results in queues. The engine does not wait for files:
when blocks run short, saves and loads are cancelled.
"""

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from headstart.cache.blocks import STATE, TRUNK, Block, BlockPart, BlockPool
from headstart.cache.recurrent import StateCacheManager
from headstart.cache.store import BlockStore, Tier, time_of_use
from headstart.core import Sequence

MAX_LOAD_S = 30.0  # seconds after which a request no longer waits for a load


@dataclass(eq=False)
class BlockTransfer:
    """Transfer of one part of a block, or of a recurrent state (`block` is None)."""

    part_number: int
    part: BlockPart
    key: bytes
    index: int  # block or state slot
    block: Block | None = None
    when_ns: int = 0  # time of last use, stored with the file (time.time_ns)
    known: bool = False  # the store had the file before
    cold: bool = False  # the file was on disk, and is being read ahead
    tier: Tier | None = None  # tier from which the file was read; None: it is missing


@dataclass(eq=False)
class PrefixLoad:
    """Load of one prefix, and the sequences that wait for it."""

    sequences: list[Sequence]
    keys: list[bytes]  # key of each block in `blocks`
    blocks: list[Block]
    num_present: int  # number of leading blocks that were in the pool
    items: list[tuple[int, BlockTransfer]]  # (index in `blocks`, transfer)
    todo: deque[BlockTransfer] = field(default_factory=deque)  # transfers not started
    running: int = 0  # number of workers
    started_s: float = field(default_factory=time.monotonic)
    state: int | None = None  # slot held for the recurrent state

    @property
    def is_overdue(self) -> bool:
        return time.monotonic() - self.started_s > MAX_LOAD_S

    @property
    def first(self) -> bytes | None:
        """Key of the first block to load; None: no block."""
        return self.keys[self.num_present] if self.num_present < len(self.keys) else None


log = logging.getLogger("headstart.cache")

TOUCH_INTERVAL_S = 60.0
"""Seconds after which a reused block is marked as used in the store, or saved again if it was removed there."""
MAX_LOADERS = 4  # maximum number of reading threads: checking a file takes longer than reading it from memory
READ_AHEAD_FILES = 16  # number of files of a load that are read ahead
CANCEL_WAIT_S = 0.2  # seconds that the engine waits for running reads when it needs their blocks
STATE_SEARCH_BLOCKS = 64  # number of last blocks of a prefix that are searched for a recurrent state


class KVSpill:
    """The block store behind one engine's pools. `hits`: prompt tokens found in the store, by tier."""

    def __init__(
        self, store: BlockStore, pool: BlockPool, states: StateCacheManager | None, parts: Mapping[int, BlockPart],
        block_size: int,
    ) -> None:  # fmt: skip
        self.store, self.hits = store, Counter[Tier]()
        self._pool, self._states, self._parts, self._block_size = pool, states, dict(parts), block_size
        self._guard = threading.Lock()  # protects the queues that workers take from
        self._to_save: deque[BlockTransfer] = deque()
        self._saved: deque[BlockTransfer] = deque()  # results of the saving thread
        self._loaded: deque[PrefixLoad] = deque()  # results of the reading threads
        self._reader_ended = threading.Event()  # set when a reading thread has ended
        self._loads: list[PrefixLoad] = []  # running loads
        self._ready: list[Sequence] = []  # sequences that no longer wait for a load
        self._load_starters: set[Sequence] = set()  # waiting sequences that have started a load
        self._unattached: dict[Sequence, PrefixLoad] = {}  # ended loads whose sequence is not admitted yet
        self._saver = ThreadPoolExecutor(1, "headstart-save")
        self._loaders = ThreadPoolExecutor(min(MAX_LOADERS, os.cpu_count() or 1), "headstart-load")

    @property
    def names(self) -> dict[int, str]:
        """Store name of each part, by part number."""
        return {number: part.name for number, part in self._parts.items()}

    @property
    def trunk_name(self) -> str:
        return self._parts[TRUNK].name

    def extent(self, keys: Seq[bytes]) -> int:
        """Number of leading keys in pool or store, by a few look-ups. Thread-safe."""
        return self._extent(keys, self._num_known(keys))

    def _num_known(self, keys: Seq[bytes]) -> int:
        """Number of leading keys in the pool."""
        return next((i for i, key in enumerate(keys) if self._pool.find(key) is None), len(keys))

    def save(self, chain: Iterable[tuple[int, bytes, Block]]) -> None:
        """Saves published blocks (index in the prefix, key, block) that are not in the store."""
        now, now_ns, items = time.monotonic(), time.time_ns(), []
        for place, key, block in chain:
            if self._pool.find(key) is not block:  # an equal block was published before
                continue
            for number, part in self._parts.items():
                if number == STATE or (number != TRUNK and block.filled.get(number, 0) < self._block_size):
                    continue
                before = block.stored_at.get(number)
                if before is not None and now - before < TOUCH_INTERVAL_S:
                    continue
                block.stored_at[number] = now
                self._pool.share(block)
                when_ns = time_of_use(now_ns, place)
                items.append(BlockTransfer(number, part, key, block.index, block, when_ns, before is not None))
        self._queue_saves(items)

    def save_states(self, snapshots: Iterable[tuple[bytes, int]]) -> None:
        """Saves recurrent states: (key of the last block before the state, slot)."""
        assert self._states is not None
        part, items = self._parts[STATE], []
        for key, slot in snapshots:
            self._states.pin(slot)
            items.append(BlockTransfer(STATE, part, key, slot, None, time.time_ns()))
        self._queue_saves(items)

    def _queue_saves(self, items: list[BlockTransfer]) -> None:
        """Gives transfers to the saving thread."""
        if items:
            with self._guard:
                self._to_save.extend(items)
            self._saver.submit(self._save_all).add_done_callback(_log_error)

    def _save_all(self) -> None:
        while True:
            with self._guard:
                if not self._to_save:
                    return
                item = self._to_save.popleft()
            try:
                self._save(item)
            finally:
                with self._guard:
                    self._saved.append(item)

    def _save(self, item: BlockTransfer) -> None:
        part, store = item.part, self.store
        # an existing file is overwritten unless known: it may be damaged
        if item.known and store.touch(part.name, item.key, item.when_ns):
            return
        if not store.put(part.name, item.key, part.read(item.index), item.when_ns) and item.block:
            item.block.stored_at.pop(item.part_number, None)

    def flush(self, seconds: float | None = None) -> None:
        """Waits until all queued saves are done. Thread-safe. Raises TimeoutError."""
        self._saver.submit(int).result(seconds)

    def fetch(self, sequence: Sequence, keys: Seq[bytes]) -> bool:
        """Starts to load the blocks of a prefix that are in the store but not in the pool; False if there are none."""
        if sequence in self._load_starters or any(load.is_overdue for load in self._loads):
            return False
        known = self._num_known(keys)
        for load in self._loads:
            if known < len(keys) and load.first == keys[known]:
                load.sequences.append(sequence)
                return True
        count, wants_state = self._extent(keys, known), False
        if self._states:
            count, is_in_memory = self._state_before(keys, count)
            wants_state = not is_in_memory
        if count <= known and not wants_state:
            return False
        self._start_load(sequence, list(keys[:count]), min(known, count), wants_state=wants_state)
        return True

    def _extent(self, keys: Seq[bytes], known: int) -> int:
        """Number of leading keys in the pool (`known`) or the store, by a doubling search."""
        name, low, step = self.trunk_name, known, 1
        while low < len(keys) and self.store.has(name, keys[min(low + step, len(keys)) - 1]):
            low = min(low + step, len(keys))
            step *= 2
        while step > 1:
            step //= 2
            if low + step <= len(keys) and self.store.has(name, keys[low + step - 1]):
                low += step
        return low

    def _state_before(self, keys: Seq[bytes], count: int) -> tuple[int, bool]:
        """(number of keys in the longest prefix with a recurrent state, whether the state is in memory); (0, True) if
        no prefix has one."""
        assert self._states is not None
        name = self._parts[STATE].name
        every = self._states.snapshot_interval // self._block_size
        for n in range(count, 0, -1):
            if self._states.has(keys[n - 1]):
                return n, True
            if (n > count - STATE_SEARCH_BLOCKS or n % every == 0) and self.store.has(name, keys[n - 1]):
                return n, False
        return 0, True

    def _start_load(self, sequence: Sequence, keys: list[bytes], known: int, *, wants_state: bool) -> None:
        """Starts the load of a prefix whose first `known` blocks are in the pool, as far as blocks are free."""
        pool, blocks = self._pool, list[Block]()
        for key in keys[:known]:
            block = pool.find(key)
            assert block is not None
            pool.share(block)
            blocks.append(block)
        while len(blocks) < len(keys) and pool.num_free:
            blocks.append(pool.allocate())
        load = PrefixLoad([sequence], keys, blocks, known, [])
        for place in range(known, len(blocks)):
            parts = ((number, part) for number, part in self._parts.items() if number != STATE)
            load.items += [(place, BlockTransfer(n, part, keys[place], blocks[place].index)) for n, part in parts]
        if wants_state and len(blocks) == len(keys):
            assert self._states is not None
            load.state = self._states.reserve_slot()
            if load.state is not None:
                load.items.append((len(keys) - 1, BlockTransfer(STATE, self._parts[STATE], keys[-1], load.state)))
        load.todo.extend(item for _, item in load.items)
        self._loads.append(load)
        self._load_starters.add(sequence)
        load.running = min(MAX_LOADERS, len(load.items)) or 1
        for _ in range(load.running):
            self._loaders.submit(self._load_all, load).add_done_callback(_log_error)

    def _load_all(self, load: PrefixLoad) -> None:
        try:
            while True:
                with self._guard:
                    if not load.todo:
                        return
                    item = load.todo.popleft()
                    ahead = load.todo[READ_AHEAD_FILES] if len(load.todo) > READ_AHEAD_FILES else None
                if ahead:
                    ahead.cold = self.store.read_ahead(ahead.part.name, ahead.key)
                if not self._load(item) and item.part_number == TRUNK:
                    with self._guard:
                        load.todo.clear()  # later blocks are useless without this one
        finally:
            with self._guard:
                load.running -= 1
                if not load.running:
                    self._loaded.append(load)
            self._reader_ended.set()

    def _load(self, item: BlockTransfer) -> bool:
        result = self.store.get(item.part.name, item.key, item.part.num_bytes, cold=item.cold)
        if result is None:
            return False
        item.part.write(item.index, result[0])
        item.tier = result[1]
        return True

    def collect(self) -> list[Sequence]:
        """Processes the workers' results; returns sequences that no longer wait."""
        self._process_results()
        for load in self._loads:
            if load.is_overdue and load.sequences:
                log.warning("a prefix was not loaded within %.0f s and is computed instead", MAX_LOAD_S)
                self._ready += load.sequences
                load.sequences = []
                self._cancel(load)
        ready, self._ready = self._ready, []
        return ready

    @property
    def num_spare(self) -> int:
        """Number of blocks that are held only for saving."""
        with self._guard:
            items = [item for item in (*self._to_save, *self._saved) if item.block]
        waiting = Counter(item.index for item in items)
        blocks = {item.index: item.block for item in items if item.block}
        return sum(block.references == waiting[index] for index, block in blocks.items())

    def _process_results(self) -> None:
        """Processes the results of all threads."""
        self._reader_ended.clear()
        with self._guard:
            saved, self._saved = self._saved, deque()
        for item in saved:
            if item.block:
                self._pool.release(item.block)
            elif self._states:
                self._states.unpin(item.index)
        while self._loaded:
            self._end_load(self._loaded.popleft())

    def _end_load(self, load: PrefixLoad) -> None:
        """Publishes the loaded blocks before the first missing one; they stay held for the load's first sequence."""
        self._loads.remove(load)
        missing = [place for place, item in load.items if item.part_number == TRUNK and item.tier is None]
        num_usable = min(missing, default=len(load.blocks))
        now = time.monotonic()
        for place, item in load.items:
            if item.part_number == STATE or item.tier is None or place >= num_usable:
                continue
            block = load.blocks[place]
            if item.part is self._parts.get(item.part_number):  # False if the head was changed since
                block.stored_at[item.part_number] = now
                if item.part_number != TRUNK:
                    block.filled[item.part_number] = self._block_size
        for place in range(load.num_present, num_usable):
            self._pool.publish(load.blocks[place], load.keys[place])
        while len(load.blocks) > num_usable:
            self._pool.release(load.blocks.pop())
        if load.state is not None:
            assert self._states is not None
            is_complete = num_usable == len(load.keys) and load.items[-1][1].tier is not None
            if not self._states.loaded(load.state, load.keys[-1] if is_complete else None):
                load.state = None
        self._ready += load.sequences
        if load.sequences and load.sequences[0] in self._load_starters:
            self._unattached[load.sequences[0]] = load
        else:
            self._release(load)

    def attached(self, sequence: Sequence) -> None:
        """Frees the hold on loaded blocks, which the admitted sequence now references."""
        self._load_starters.discard(sequence)
        if load := self._unattached.pop(sequence, None):
            for place, item in load.items:
                if item.part_number == TRUNK and item.tier is not None and place < len(load.blocks):
                    self.hits[item.tier] += self._block_size
            self._release(load)

    def drop(self, sequence: Sequence) -> None:
        """Removes a sequence that will not be admitted from its load."""
        self._load_starters.discard(sequence)
        if sequence in self._ready:
            self._ready.remove(sequence)
        if load := self._unattached.pop(sequence, None):
            self._release(load)
        for load in self._loads:
            if sequence in load.sequences:
                load.sequences.remove(sequence)
                if not load.sequences:
                    self._cancel(load)

    def free_blocks(self, wanted: int) -> None:
        """Frees blocks held only for saving or loading, until `wanted` are free if possible."""
        pool = self._pool
        self._process_results()
        for item in self._take_unsaved(wanted - pool.num_free):
            assert item.block is not None
            item.block.stored_at.pop(item.part_number, None)
            pool.release(item.block)
        self._free_unattached(wanted)
        if pool.num_free < wanted and self._loads:
            for load in self._loads:
                self._cancel(load)
            ends = time.monotonic() + CANCEL_WAIT_S
            while self._loads and time.monotonic() < ends:
                self._reader_ended.wait(CANCEL_WAIT_S / 20)
                self._process_results()
            self._free_unattached(wanted)

    def _free_unattached(self, wanted: int) -> None:
        """Releases ended loads until `wanted` blocks are free."""
        while self._pool.num_free < wanted and self._unattached:
            self._release(self._unattached.popitem()[1])

    def _take_unsaved(self, wanted: int) -> list[BlockTransfer]:
        """Removes queued saves of up to `wanted` blocks that nothing else references, latest blocks first."""
        removed: list[BlockTransfer] = []
        with self._guard:
            waiting = Counter(item.index for item in self._to_save if item.block)
            blocks = {item.index: item.block for item in reversed(self._to_save) if item.block}
            alone = [index for index, block in blocks.items() if block.references == waiting[index]]
            chosen = set(alone[: max(wanted, 0)])
            kept: deque[BlockTransfer] = deque()
            for item in self._to_save:
                (removed if item.block and item.index in chosen else kept).append(item)
            self._to_save = kept
        return removed

    def _cancel(self, load: PrefixLoad) -> None:
        """Drops the transfers of a load that no thread has started."""
        with self._guard:
            load.todo.clear()

    def _release(self, load: PrefixLoad) -> None:
        """Releases the blocks and the state that are held for a load."""
        while load.blocks:
            self._pool.release(load.blocks.pop())
        if load.state is not None and self._states:
            self._states.unpin(load.state)
            load.state = None

    def change(self, parts: Mapping[int, BlockPart]) -> None:
        """Replaces the parts after a change of head; drops all transfers."""
        with self._guard:
            self._saved.extend(self._to_save)
            self._to_save.clear()
        for load in self._loads:
            self._cancel(load)
        self.flush()
        for block in self._pool.blocks:
            block.stored_at.clear()
        self._parts = dict(parts)

    def wait(self, seconds: float) -> None:
        """Waits until something is loaded, if a load is running."""
        if self._loads:
            self._reader_ended.wait(seconds)

    def close(self) -> None:
        """Finishes all saves and stops the workers."""
        for load in self._loads:
            self._cancel(load)
        self._loaders.shutdown()
        self._saver.shutdown()


def _log_error(work: Future[None]) -> None:
    if error := work.exception():
        log.error("blocks could not be moved", exc_info=error)
