"""Slots of recurrent state: one per running sequence, and snapshots of prefixes.

A sequence's slot holds the state after its committed rows. Drafted rows are kept beside it and, if accepted, applied
first in the next pass (core.StateSteps): a draft needs no copy of the state, which has a megabyte and more per layer. A
snapshot is written by the pass that computes its prefix, and found by the key of the prefix's last block.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from headstart.core import Int32, Rows, Sequence, Span, StateSteps

SNAPSHOT_EVERY = 256  # positions between snapshots of a sequence, besides the one at the end of its prompt


@dataclass
class _SequenceState:
    """State of one sequence."""

    own: int  # the sequence's slot
    source: int = -1  # slot of the current state; -1: zeros
    position: int = 0  # position that the state precedes
    # position -> slot of snapshots that are written but not published
    pending: dict[int, int] = field(default_factory=dict)
    heads: dict[int, int] = field(default_factory=dict)  # head's network -> position that its older state precedes


class _SequenceSteps(NamedTuple):
    """StateSteps of one sequence."""

    own: int
    read: int
    start: int
    keep: int
    stores: list[tuple[int, int]]  # (position, slot), ascending


def _joined(sequences: Seq[_SequenceSteps]) -> StateSteps:
    own, reads, starts, keeps, stores = zip(*sequences, strict=True)
    positions, slots = zip(*chain.from_iterable(stores), strict=True)
    arrays = (own, reads, starts, keeps, [0, *accumulate(map(len, stores))], positions, slots)
    return StateSteps(*(np.array(each, np.int32) for each in arrays))


class StateCacheManager:
    """Slots 0 .. num_running - 1 belong to sequences and keep up to `num_kept` drafted rows; others are snapshots."""

    def __init__(
        self, num_running: int, num_snapshots: int, num_kept: int, *, block_size: int, every: int = SNAPSHOT_EVERY
    ) -> None:
        self.num_running, self.num_slots, self.num_kept = num_running, num_running + num_snapshots, num_kept
        self._block_size = block_size
        self.snapshot_interval = -(-every // block_size) * block_size  # in positions
        self._free = list(range(num_running))[::-1]
        self._unused = list(range(num_running, self.num_slots))[::-1]
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # block key -> slot, least recently used first
        self._states: dict[Sequence, _SequenceState] = {}
        self._reading: set[int] = set()  # slots that the latest pass reads
        self._pinned: Counter[int] = Counter()  # slot -> number of holders (spill, loads)
        self._loading: set[int] = set()  # slots that are being loaded

    def hold(self, sequence: Sequence) -> bool:
        """Gives the sequence a slot unless it has one; False if none is free."""
        if sequence not in self._states:
            if not self._free:
                return False
            self._states[sequence] = _SequenceState(self._free.pop())
        return True

    def attach(self, sequence: Sequence, keys: Seq[bytes]) -> int:
        """Starts from the snapshot of the longest prefix of these blocks that has one; returns the number of blocks in
        that prefix, 0 if there is none."""
        if not self.hold(sequence):
            return 0
        count = next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self._snapshots), 0)
        if count:
            self._snapshots.move_to_end(keys[count - 1])
            state = self._states[sequence]
            state.source, state.position = self._snapshots[keys[count - 1]], count * self._block_size
        return count

    def plan(self, spans: Iterable[Span]) -> StateSteps:
        """StateSteps of a pass over these spans. The states advance at once: the caller must run the pass. All rows
        except drafted ones are committed."""
        self._reading = set()
        sequences: list[_SequenceSteps] = []
        for span in spans:
            state, end = self._states[span.sequence], span.start + span.num_rows
            true_end = min(end, max(len(span.sequence.tokens), span.start))
            assert state.position <= span.start, "a recurrent state cannot go back"
            assert end - true_end <= self.num_kept, "more drafted rows than are kept"
            self._reading.add(state.source)
            snapshots = self._new_snapshots(span.sequence, state, true_end)
            stores = [*snapshots.items(), (true_end, state.own)]
            sequences.append(_SequenceSteps(state.own, state.source, state.position, true_end, stores))
            state.pending |= snapshots
            state.source, state.position = state.own, true_end
        return _joined(sequences)

    def plan_head(self, network: int, rows: Iterable[Rows], num_recomputed: int) -> StateSteps:
        """StateSteps of a pass of a head with states, over pairs of committed tokens or one drafted token. The pools of
        a head have two slots for each sequence. The sequence's own slot has the state after the latest row. The slot
        `num_running` further has the state before the newest `num_recomputed` pairs, where the next pairs begin.
        Without that state (after a prefix hit) pairs begin with zeros; drafts may then be worse."""
        sequences: list[_SequenceSteps] = []
        for part in rows:
            state, end = self._states[part.sequence], part.start + len(part.token_ids)
            older, next_start = state.own + self.num_running, end - num_recomputed
            read, stores = state.own, [(end, state.own)]
            if part.start < len(part.sequence.tokens):
                read = older if state.heads.get(network) == part.start else -1
                if next_start > part.start:
                    stores.insert(0, (next_start, older))
            sequences.append(_SequenceSteps(state.own, read, part.start, end, stores))
        return _joined(sequences)

    def fill_head(self, sequence: Sequence, network: int, position: int) -> None:
        """Marks the older state of `plan_head` as the one before `position`, when all modules have stored it."""
        self._states[sequence].heads[network] = position

    def _new_snapshots(self, sequence: Sequence, state: _SequenceState, end: int) -> dict[int, int]:
        """Position -> slot of the snapshots to write between the sequence's state and `end`, in ascending order."""
        size, snapshot_slots = self._block_size, {}
        for position in range(state.position // size * size + size, end + 1, size):
            if position % self.snapshot_interval == 0 or position == (sequence.num_prompt - 1) // size * size:
                slot = self._take()
                if slot is not None:
                    snapshot_slots[position] = slot
        return snapshot_slots

    def _take(self) -> int | None:
        """A slot for a snapshot: an unused one, or else the least recently used snapshot's."""
        if self._unused:
            return self._unused.pop()
        busy = self._reading | {state.source for state in self._states.values()} | self._pinned.keys()
        key = next((key for key, slot in self._snapshots.items() if slot not in busy), None)
        return None if key is None else self._snapshots.pop(key)

    def publish(self, sequence: Sequence, keys: Seq[bytes]) -> list[tuple[bytes, int]]:
        """Makes snapshots at the ends of the sequence's first blocks findable; returns new (key, slot) pairs."""
        state, new = self._states[sequence], list[tuple[bytes, int]]()
        for position in [each for each in state.pending if each <= len(keys) * self._block_size]:
            key, slot = keys[position // self._block_size - 1], state.pending.pop(position)
            if key in self._snapshots:
                self._unused.append(slot)
            else:
                self._snapshots[key] = slot
                new.append((key, slot))
            self._snapshots.move_to_end(key)
        return new

    def has(self, key: bytes) -> bool:
        """True if there is a snapshot after the block with this key."""
        return key in self._snapshots

    def pin(self, slot: int) -> None:
        """Keeps a snapshot in its slot until it is unpinned as often."""
        self._pinned[slot] += 1

    def unpin(self, slot: int) -> None:
        self._pinned[slot] -= 1
        if not self._pinned[slot]:
            del self._pinned[slot]

    def reserve_slot(self) -> int | None:
        """A slot for a snapshot to be loaded, until `loaded`; None if all are busy."""
        slot = self._take()
        if slot is not None:
            self._loading.add(slot)
        return slot

    def loaded(self, slot: int, key: bytes | None) -> bool:
        """Ends a load into a reserved slot: publishes and pins the snapshot of `key`. Returns False, and frees the
        slot, if key is None (the load failed) or known."""
        self._loading.remove(slot)
        if key is None or key in self._snapshots:
            self._unused.append(slot)
            return False
        self._snapshots[key] = slot
        self.pin(slot)
        return True

    def rewind(self, sequence: Sequence, position: int) -> None:
        """Sets the position of the state without changing it, for measurements that repeat a pass."""
        self._states[sequence].position = position

    def release(self, sequence: Sequence) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            self._free.append(state.own)
            self._unused += state.pending.values()

    def check(self) -> None:
        """Asserts that every slot has one use (tests)."""
        own = [state.own for state in self._states.values()]
        assert sorted(own + self._free) == list(range(self.num_running))
        pending = [slot for state in self._states.values() for slot in state.pending.values()]
        snapshot_slots = pending + self._unused + list(self._snapshots.values()) + list(self._loading)
        assert sorted(snapshot_slots) == list(range(self.num_running, self.num_slots))


def states_from_zero(ends: Int32) -> StateSteps:
    """StateSteps of a pass over whole sequences of these lengths, from zero states; nothing is kept."""
    zeros, empty = np.zeros_like(ends), np.zeros(0, np.int32)
    return StateSteps(zeros, zeros - 1, zeros, ends, np.zeros(len(ends) + 1, np.int32), empty, empty)
