"""Slots of recurrent state: one for each sequence that runs, the others for snapshots of prefixes.

A sequence's slot holds the state after its true rows; rows that were drafted are kept and, as far as they came true,
go first in the next pass (StateSteps). So a draft costs no copy of the state, which is a megabyte and more per layer.
A snapshot is written by the pass that computes its prefix, and is found by the key of the prefix's last block.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from headstart.core import Int32, Sequence, Span, StateSteps

SNAPSHOT_EVERY = 256
"""Positions between two snapshots of one sequence, beside the one at the end of its prompt."""


@dataclass
class _Held:
    """`own`: the sequence's slot. Its state stands before `position`, and is read in slot `source` (-1: zeros).
    `pending`: snapshots that are written but not yet found, by their position."""

    own: int
    source: int = -1
    position: int = 0
    pending: dict[int, int] = field(default_factory=dict)


class StateMemory:
    """Slots 0 .. num_running - 1 belong to sequences and keep up to `num_kept` drafted rows; others are snapshots."""

    def __init__(
        self, num_running: int, num_snapshots: int, num_kept: int, *, block_size: int, every: int = SNAPSHOT_EVERY
    ) -> None:
        self.num_running, self.num_slots, self.num_kept = num_running, num_running + num_snapshots, num_kept
        self._block_size, self._every = block_size, -(-every // block_size) * block_size
        self._free = list(range(num_running))[::-1]
        self._unused = list(range(num_running, self.num_slots))[::-1]
        self._snapshots: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._held: dict[Sequence, _Held] = {}
        self._reading: set[int] = set()  # slots that the latest pass reads
        self._pinned: Counter[int] = Counter()  # snapshots that somebody copies, or waits for
        self._arriving: set[int] = set()  # slots that are written from elsewhere

    @property
    def every(self) -> int:
        """Positions between two snapshots, whole blocks."""
        return self._every

    def hold(self, sequence: Sequence) -> bool:
        """Give the sequence a slot of its own, unless it has one; False when none is free."""
        if sequence not in self._held:
            if not self._free:
                return False
            self._held[sequence] = _Held(self._free.pop())
        return True

    def attach(self, sequence: Sequence, keys: Seq[bytes]) -> int:
        """Start from the longest prefix with a snapshot, of those whose blocks have these keys; returns its number of
        blocks."""
        if not self.hold(sequence):
            return 0
        count = next((n for n in range(len(keys), 0, -1) if keys[n - 1] in self._snapshots), 0)
        if count:
            self._snapshots.move_to_end(keys[count - 1])
            held = self._held[sequence]
            held.source, held.position = self._snapshots[keys[count - 1]], count * self._block_size
        return count

    def plan(self, spans: Iterable[Span]) -> StateSteps:
        """What a pass over these spans does, and note it as done. All rows but those of drafts are true."""
        self._reading = set()
        own, reads, starts, keeps, store_starts = [], [], [], [], [0]
        positions: list[int] = []
        slots: list[int] = []
        for span in spans:
            held, end = self._held[span.sequence], span.start + span.num_rows
            true_end = min(end, max(len(span.sequence.tokens), span.start))
            assert held.position <= span.start, "a recurrent state cannot go back"
            assert end - true_end <= self.num_kept, "more drafted rows than are kept"
            own.append(held.own)
            reads.append(held.source)
            starts.append(held.position)
            keeps.append(true_end)
            self._reading.add(held.source)
            snapshots = self._new_snapshots(span.sequence, held, true_end)
            positions += [*snapshots, true_end]
            slots += [*snapshots.values(), held.own]
            store_starts.append(len(slots))
            held.pending |= snapshots
            held.source, held.position = held.own, true_end
        arrays = (own, reads, starts, keeps, store_starts, positions, slots)
        return StateSteps(*(np.array(each, np.int32) for each in arrays))

    def _new_snapshots(self, sequence: Sequence, held: _Held, end: int) -> dict[int, int]:
        """Slots of the snapshots that a walk from the sequence's state to `end` passes, in ascending order."""
        size, taken = self._block_size, {}
        for position in range(held.position // size * size + size, end + 1, size):
            if position % self._every == 0 or position == (sequence.num_prompt - 1) // size * size:
                slot = self._take()
                if slot is not None:
                    taken[position] = slot
        return taken

    def _take(self) -> int | None:
        """A slot for a snapshot: an unused one, else that of the snapshot whose last use is the longest ago."""
        if self._unused:
            return self._unused.pop()
        busy = self._reading | {held.source for held in self._held.values()} | self._pinned.keys()
        key = next((key for key, slot in self._snapshots.items() if slot not in busy), None)
        return None if key is None else self._snapshots.pop(key)

    def publish(self, sequence: Sequence, keys: Seq[bytes]) -> list[tuple[bytes, int]]:
        """The sequence's first blocks have these keys: snapshots at their ends can be found from now on. Returns those
        that are new, with their slots."""
        held, new = self._held[sequence], list[tuple[bytes, int]]()
        for position in [each for each in held.pending if each <= len(keys) * self._block_size]:
            key, slot = keys[position // self._block_size - 1], held.pending.pop(position)
            if key in self._snapshots:
                self._unused.append(slot)
            else:
                self._snapshots[key] = slot
                new.append((key, slot))
            self._snapshots.move_to_end(key)
        return new

    def has(self, key: bytes) -> bool:
        """Is there a snapshot behind the block with this key?"""
        return key in self._snapshots

    def pin(self, slot: int) -> None:
        """A snapshot stays where it is until it is unpinned as often."""
        self._pinned[slot] += 1

    def unpin(self, slot: int) -> None:
        self._pinned[slot] -= 1
        if not self._pinned[slot]:
            del self._pinned[slot]

    def reserve_slot(self) -> int | None:
        """A slot for a snapshot from elsewhere, until it has `arrived`; None where all are busy."""
        slot = self._take()
        if slot is not None:
            self._arriving.add(slot)
        return slot

    def arrived(self, slot: int, key: bytes | None) -> bool:
        """The slot holds the state behind the block with this key, and is found and pinned; or nothing (None). False
        where it is not needed."""
        self._arriving.remove(slot)
        if key is None or key in self._snapshots:
            self._unused.append(slot)
            return False
        self._snapshots[key] = slot
        self.pin(slot)
        return True

    def rewind(self, sequence: Sequence, position: int) -> None:
        """Take the state for that before `position`, whatever it is: for measurements that repeat a pass."""
        self._held[sequence].position = position

    def release(self, sequence: Sequence) -> None:
        held = self._held.pop(sequence, None)
        if held is not None:
            self._free.append(held.own)
            self._unused += held.pending.values()

    def check(self) -> None:
        """Assert that every slot is in one place (tests)."""
        own = [held.own for held in self._held.values()]
        assert sorted(own + self._free) == list(range(self.num_running))
        pending = [slot for held in self._held.values() for slot in held.pending.values()]
        taken = pending + self._unused + list(self._snapshots.values()) + list(self._arriving)
        assert sorted(taken) == list(range(self.num_running, self.num_slots))


def states_from_zero(ends: Int32) -> StateSteps:
    """Of a pass over whole sequences of these lengths, after which nothing is kept."""
    zeros, nothing = np.zeros_like(ends), np.zeros(0, np.int32)
    return StateSteps(zeros, zeros - 1, zeros, ends, np.zeros(len(ends) + 1, np.int32), nothing, nothing)
