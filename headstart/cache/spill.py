"""Blocks on their way between pools and a store: saved behind the engine's back, loaded while a request waits.

Two worlds. Methods without an underscore run in the engine's thread, which alone counts references and publishes.
Workers read and write files, and the bytes of blocks that are held for them; what they have done comes back in queues.
Nobody has to wait for a file: where blocks run short, what only waits to be saved or loaded is given up.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor

from headstart.cache.blocks import Block, BlockPool
from headstart.cache.moving import LONGEST, Item, Load
from headstart.cache.parts import STATE, TRUNK, Part
from headstart.cache.recurrent import StateMemory
from headstart.cache.store import BlockStore, Tier
from headstart.core import Sequence

log = logging.getLogger("headstart.cache")

TOUCH_EVERY = 60.0
"""Seconds after which a block that is used again is marked as used in the store, or saved if it has gone from there."""
LOADERS = 4
"""Threads that read, at most: checking takes longer than reading from memory."""
AHEAD = 16
"""Files of a load that a disk may begin to read at once."""
PATIENCE = 0.2
"""Seconds that the engine waits for reads that have begun, where it needs their blocks."""
STATES_BACK = 64
"""Blocks from the end of a known prefix at which a recurrent state is looked for."""


class Spill:
    """The store behind one engine's pools. `parts`: what of a block is kept, by number; of STATE items are slots of
    `states`. `hits`: tokens of prompts that were found in the store, by where they were."""

    def __init__(
        self, store: BlockStore, pool: BlockPool, states: StateMemory | None, parts: Mapping[int, Part], block_size: int
    ) -> None:
        self.store, self.hits = store, Counter[Tier]()
        self._pool, self._states, self._parts, self._block_size = pool, states, dict(parts), block_size
        self._guard = threading.Lock()  # of queues that workers take from
        self._to_save: deque[Item] = deque()
        self._saved: deque[Item] = deque()
        self._loaded: deque[Load] = deque()
        self._came = threading.Event()  # something was loaded
        self._loads: list[Load] = []
        self._ready: list[Sequence] = []
        self._led: set[Sequence] = set()  # sequences that had a load of their own
        self._held: dict[Sequence, Load] = {}  # loaded, and not yet attached to
        self._saver = ThreadPoolExecutor(1, "headstart-save")
        self._loaders = ThreadPoolExecutor(min(LOADERS, os.cpu_count() or 1), "headstart-load")

    @property
    def names(self) -> dict[int, str]:
        """Under which each part of a block is stored."""
        return {number: part.name for number, part in self._parts.items()}

    @property
    def trunk_name(self) -> str:
        return self._parts[TRUNK].name

    def extent(self, keys: Seq[bytes]) -> int:
        """How many of the first keys are in the pool or the store, as far as can be told from a few. Any thread."""
        known = next((i for i, key in enumerate(keys) if self._pool.find(key) is None), len(keys))
        return self._extent(keys, known)

    # Saving.

    def save(self, chain: Iterable[tuple[int, bytes, Block]]) -> None:
        """Blocks by their place in a prefix, first to last, with their keys: what the store does not have yet."""
        now, now_ns, items = time.monotonic(), time.time_ns(), []
        for place, key, block in chain:
            if self._pool.find(key) is not block:  # an equal one was there before
                continue
            for number, part in self._parts.items():
                if number == STATE or (number != TRUNK and block.filled.get(number, 0) < self._block_size):
                    continue
                before = block.kept.get(number)
                if before is not None and now - before < TOUCH_EVERY:
                    continue
                block.kept[number] = now
                self._pool.share(block)
                # the end of a prefix is worth nothing without its begin, which goes last
                items.append(Item(number, part, key, block.index, block, now_ns - place * 1000, before is not None))
        self._send(items)

    def save_states(self, snapshots: Iterable[tuple[bytes, int]]) -> None:
        """Recurrent states, by the key of the last block before them, in their slots."""
        assert self._states is not None
        part, items = self._parts[STATE], []
        for key, slot in snapshots:
            self._states.pin(slot)
            items.append(Item(STATE, part, key, slot, None, time.time_ns()))
        self._send(items)

    def _send(self, items: list[Item]) -> None:
        if items:
            with self._guard:
                self._to_save.extend(items)
            self._saver.submit(self._save_all).add_done_callback(_tell)

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

    def _save(self, item: Item) -> None:
        part, store = item.part, self.store
        # what was computed is written even where there is a file, which was broken or nobody had time to read
        if item.known and store.touch(part.name, item.key, item.when_ns):
            return
        if not store.put(part.name, item.key, part.read(item.index), item.when_ns) and item.block:
            item.block.kept.pop(item.number, None)

    def flush(self, seconds: float | None = None) -> None:
        """Until all that was to be saved by now is in the store. For any thread. Raises TimeoutError."""
        self._saver.submit(int).result(seconds)

    # Loading.

    def fetch(self, sequence: Sequence, keys: Seq[bytes]) -> bool:
        """Begin to read what the store has of a prefix beyond what is in the pool; False where there is nothing."""
        if sequence in self._led or any(load.is_overdue for load in self._loads):
            return False
        known = next((i for i, key in enumerate(keys) if self._pool.find(key) is None), len(keys))
        for load in self._loads:
            if known < len(keys) and load.first == keys[known]:
                load.sequences.append(sequence)
                return True
        count = self._extent(keys, known)
        state = self._state_before(keys, count) if self._states else None
        if state is not None:
            count, found = state
            if count <= known and (not count or found):
                return False
        elif count == known:
            return False
        self._begin(sequence, list(keys[:count]), min(known, count), wants_state=state is not None and not state[1])
        return True

    def _extent(self, keys: Seq[bytes], known: int) -> int:
        """How many of the first keys are in the pool or, as far as can be told from a few, in the store."""
        name, low, step = self._parts[TRUNK].name, known, 1
        while low < len(keys) and self.store.has(name, keys[min(low + step, len(keys)) - 1]):
            low = min(low + step, len(keys))
            step *= 2
        while step > 1:
            step //= 2
            if low + step <= len(keys) and self.store.has(name, keys[low + step - 1]):
                low += step
        return low

    def _state_before(self, keys: Seq[bytes], count: int) -> tuple[int, bool]:
        """The longest of these prefixes, of those with a state, and whether that is in memory; 0 blocks: none has."""
        assert self._states is not None
        name = self._parts[STATE].name
        every = self._states.every // self._block_size
        for n in range(count, 0, -1):
            if self._states.has(keys[n - 1]):
                return n, True
            if (n > count - STATES_BACK or n % every == 0) and self.store.has(name, keys[n - 1]):
                return n, False
        return 0, True

    def _begin(self, sequence: Sequence, keys: list[bytes], known: int, *, wants_state: bool) -> None:
        pool, blocks = self._pool, list[Block]()
        for key in keys[:known]:
            block = pool.find(key)
            assert block is not None
            pool.share(block)
            blocks.append(block)
        while len(blocks) < len(keys) and pool.num_free:
            blocks.append(pool.allocate())
        load = Load([sequence], keys, blocks, known, [])
        for place in range(known, len(blocks)):
            parts = ((number, part) for number, part in self._parts.items() if number != STATE)
            load.items += [(place, Item(n, part, keys[place], blocks[place].index)) for n, part in parts]
        if wants_state and len(blocks) == len(keys):
            assert self._states is not None
            load.state = self._states.reserve_slot()
            if load.state is not None:
                load.items.append((len(keys) - 1, Item(STATE, self._parts[STATE], keys[-1], load.state)))
        load.todo.extend(item for _, item in load.items)
        self._loads.append(load)
        self._led.add(sequence)
        load.running = min(LOADERS, len(load.items)) or 1
        for _ in range(load.running):
            self._loaders.submit(self._load_all, load).add_done_callback(_tell)

    def _load_all(self, load: Load) -> None:
        try:
            while True:
                with self._guard:
                    if not load.todo:
                        return
                    item = load.todo.popleft()
                    ahead = load.todo[AHEAD] if len(load.todo) > AHEAD else None
                if ahead:
                    ahead.cold = self.store.read_ahead(ahead.part.name, ahead.key)
                if not self._load(item) and item.number == TRUNK:
                    with self._guard:
                        load.todo.clear()  # what comes behind it is of no use
        finally:
            with self._guard:
                load.running -= 1
                if not load.running:
                    self._loaded.append(load)
            self._came.set()

    def _load(self, item: Item) -> bool:
        found = self.store.get(item.part.name, item.key, item.part.num_bytes, cold=item.cold)
        if found is None:
            return False
        item.part.write(item.index, found[0])
        item.tier = found[1]
        return True

    # Both.

    def collect(self) -> list[Sequence]:
        """What workers have done comes into its place; sequences that need wait no longer."""
        self._absorb()
        for load in self._loads:
            if load.is_overdue and load.sequences:
                log.warning("a prefix could not be read within %.0f s: it is computed", LONGEST)
                self._ready += load.sequences
                load.sequences = []
                self._give_up(load)
        ready, self._ready = self._ready, []
        return ready

    @property
    def num_spare(self) -> int:
        """Blocks that nothing but the store holds."""
        with self._guard:
            items = [item for item in (*self._to_save, *self._saved) if item.block]
        waiting = Counter(item.index for item in items)
        blocks = {item.index: item.block for item in items if item.block}
        return sum(block.references == waiting[index] for index, block in blocks.items())

    def _absorb(self) -> None:
        self._came.clear()
        with self._guard:
            saved, self._saved = self._saved, deque()
        for item in saved:
            self._let_go(item)
        while self._loaded:
            self._settle(self._loaded.popleft())

    def _let_go(self, item: Item) -> None:
        if item.block:
            self._pool.release(item.block)
        elif self._states:
            self._states.unpin(item.index)

    def _settle(self, load: Load) -> None:
        """Publish what was read, up to the first gap. The blocks stay held for the sequence that asked."""
        self._loads.remove(load)
        good, now = self._good(load), time.monotonic()
        for place, item in load.items:
            if item.number == STATE or item.tier is None or place >= good:
                continue
            block = load.blocks[place]
            if item.part is self._parts.get(item.number):  # else another head has come meanwhile
                block.kept[item.number] = now
                if item.number != TRUNK:
                    block.filled[item.number] = self._block_size
        for place in range(load.fresh, good):
            self._pool.publish(load.blocks[place], load.keys[place])
        while len(load.blocks) > good:
            self._pool.release(load.blocks.pop())
        if load.state is not None:
            assert self._states is not None
            whole = good == len(load.keys) and load.items[-1][1].tier is not None
            if not self._states.arrived(load.state, load.keys[-1] if whole else None):
                load.state = None
        self._ready += load.sequences
        if load.sequences and load.sequences[0] in self._led:
            self._held[load.sequences[0]] = load
        else:
            self._free(load)

    def _good(self, load: Load) -> int:
        """Blocks up to the first whose keys and values of the trunk are missing."""
        bad = [place for place, item in load.items if item.number == TRUNK and item.tier is None]
        return min(bad, default=len(load.blocks))

    def attached(self, sequence: Sequence) -> None:
        """It holds its blocks by itself now."""
        self._led.discard(sequence)
        if load := self._held.pop(sequence, None):
            for place, item in load.items:
                if item.number == TRUNK and item.tier is not None and place < len(load.blocks):
                    self.hits[item.tier] += self._block_size
            self._free(load)

    def drop(self, sequence: Sequence) -> None:
        """Nobody waits for it any more."""
        self._led.discard(sequence)
        if sequence in self._ready:
            self._ready.remove(sequence)
        if load := self._held.pop(sequence, None):
            self._free(load)
        for load in self._loads:
            if sequence in load.sequences:
                load.sequences.remove(sequence)
                if not load.sequences:
                    self._give_up(load)

    def relieve(self, wanted: int) -> None:
        """Make so many blocks free, as far as they are held for saving and loading only."""
        pool = self._pool
        self._absorb()
        for item in self._unsaved(wanted - pool.num_free):
            assert item.block is not None
            item.block.kept.pop(item.number, None)
            pool.release(item.block)
        while pool.num_free < wanted and self._held:
            self._free(self._held.popitem()[1])
        if pool.num_free < wanted and self._loads:
            for load in self._loads:
                self._give_up(load)
            ends = time.monotonic() + PATIENCE
            while self._loads and time.monotonic() < ends:
                self._came.wait(PATIENCE / 20)
                self._absorb()
            while pool.num_free < wanted and self._held:
                self._free(self._held.popitem()[1])

    def _unsaved(self, wanted: int) -> list[Item]:
        """What waits to be saved of blocks that nobody else holds: of the latest such blocks, so many at most."""
        taken: list[Item] = []
        with self._guard:
            waiting = Counter(item.index for item in self._to_save if item.block)
            blocks = {item.index: item.block for item in reversed(self._to_save) if item.block}
            alone = [index for index, block in blocks.items() if block.references == waiting[index]]
            chosen = set(alone[: max(wanted, 0)])
            kept: deque[Item] = deque()
            for item in self._to_save:
                (taken if item.block and item.index in chosen else kept).append(item)
            self._to_save = kept
        return taken

    def _give_up(self, load: Load) -> None:
        with self._guard:
            load.todo.clear()

    def _free(self, load: Load) -> None:
        while load.blocks:
            self._pool.release(load.blocks.pop())
        if load.state is not None and self._states:
            self._states.unpin(load.state)
            load.state = None

    def change(self, parts: Mapping[int, Part]) -> None:
        """Other networks stand beside the trunk from here on: nothing of the old ones is on its way any more."""
        with self._guard:
            self._saved.extend(self._to_save)
            self._to_save.clear()
        for load in self._loads:
            self._give_up(load)
        self.flush()
        for block in self._pool.blocks:
            block.kept.clear()
        self._parts = dict(parts)

    def wait(self, seconds: float) -> None:
        """Until something has come, where something is on its way."""
        if self._loads:
            self._came.wait(seconds)

    def close(self) -> None:
        """What is to be saved is saved; nothing else happens."""
        for load in self._loads:
            self._give_up(load)
        self._loaders.shutdown()
        self._saver.shutdown()


def _tell(work: Future[None]) -> None:
    if error := work.exception():
        log.error("blocks could not be moved", exc_info=error)
