"""Who is next: sequences that wait for their first pass, or for another after they were preempted.

By priority first (lower runs earlier, as in vLLM). Of one priority what was preempted, then the owner who has been
served least: the fair scheduler of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with tokens
of prompts and outputs counted alike. A deficit round robin would have to charge an output before its length is known;
here what was written is charged. Of one owner in the order of arrival. Without owners: first come, first served.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence as Seq

from headstart.core import Sequence


class Waiting:
    """The queue beside those that run (`running`, the scheduler's own list). Other threads may ask for `len`."""

    def __init__(self, running: Seq[Sequence]) -> None:
        self._running = running
        self._queues: dict[tuple[int, str], deque[Sequence]] = {}  # by priority and owner, none of them empty
        self._held: list[Sequence] = []  # not to be next yet
        self._returned: deque[Sequence] = deque()  # preempted, the oldest first
        self._served: dict[str, float] = {}  # by owner: tokens of prompts that began and outputs that ended, per share
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._held
        yield from self._returned
        for queue in self._queues.values():
            yield from queue

    def __contains__(self, sequence: object) -> bool:
        return any(each is sequence for each in self)

    @property
    def has_next(self) -> bool:
        return bool(self._queues or self._returned)

    def let_go(self, sequence: Sequence) -> None:
        """It was held, and may be next."""
        self._held.remove(sequence)
        self._count -= 1
        self.add(sequence)

    def add(self, sequence: Sequence, *, held: bool = False) -> None:
        """Into its owner's queue, by arrival; or aside until it is let go. Who was away has no claim to what others got
        meanwhile."""
        self._count += 1
        if held:
            self._held.append(sequence)
            return
        owner = sequence.request.owner
        active = {each.request.owner for each in self._running} | {other for _, other in self._queues}
        if not active:
            self._served.clear()
        elif owner not in active:
            served = self._so_far()
            least = min(served.get(each, 0.0) for each in active)
            self._served[owner] = max(self._served.get(owner, 0.0), least)
        queue = self._queues.setdefault(_place(sequence), deque())
        if queue and queue[-1].order > sequence.order:
            insort(queue, sequence, key=_order)
        else:
            queue.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """It ran, and shall run again before others of its priority."""
        self._returned.appendleft(sequence)
        self._count += 1

    def first(self) -> Sequence:
        """The next one; there is one. It stays."""
        back = min(self._returned, key=lambda each: each.request.priority, default=None)  # of equals the first
        if not self._queues:
            assert back is not None
            return back
        place = next(iter(self._queues))
        if len(self._queues) > 1:
            served = self._so_far()
            place = min(self._queues, key=lambda each: (each[0], served.get(each[1], 0.0), self._queues[each][0].order))
        return back if back is not None and back.request.priority <= place[0] else self._queues[place][0]

    def remove(self, sequence: Sequence) -> None:
        """It is admitted, or has ended."""
        if sequence in self._returned:
            self._returned.remove(sequence)
        elif sequence in self._held:
            self._held.remove(sequence)
        else:
            queue = self._queues[_place(sequence)]
            queue.remove(sequence)
            if not queue:
                del self._queues[_place(sequence)]
        self._count -= 1

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Its owner has been served so many tokens."""
        owner = sequence.request.owner
        self._served[owner] = self._served.get(owner, 0.0) + tokens / sequence.request.share

    def _so_far(self) -> dict[str, float]:
        """What each owner was served, with what its running sequences have written by now."""
        served = dict(self._served)
        for each in self._running:
            owner = each.request.owner
            served[owner] = served.get(owner, 0.0) + each.num_output / each.request.share
        return served


def _order(sequence: Sequence) -> int:
    return sequence.order


def _place(sequence: Sequence) -> tuple[int, str]:
    return sequence.request.priority, sequence.request.owner
