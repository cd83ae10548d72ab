"""Scheduler: selects the rows of the next pass. There is no prefill or decode phase: each sequence needs len(tokens) +
len(draft) - num_computed rows, within one token budget."""

import time
from bisect import insort
from collections import deque
from collections.abc import Iterator, Sequence as Seq

from headstart.cache.kv_cache import KVCacheManager
from headstart.core import Draft, Sequence, Span


class WaitingQueue:
    """Sequences waiting for their first pass, or for another one after preemption. Other threads may call `len`.

    Order: by priority (lower first, as in vLLM); preempted sequences first within a priority; then the owner who has
    been served least, as in Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), with prompt and
    output tokens counted alike; then by arrival. With one owner: first come, first served.
    """

    def __init__(self, running: Seq[Sequence]) -> None:
        """running: the scheduler's list of running sequences."""
        self._running = running
        self._queues: dict[tuple[int, str], deque[Sequence]] = {}  # by priority and owner; none is empty
        self._loading: list[Sequence] = []  # prefixes are being loaded from files
        self._preempted: deque[Sequence] = deque()  # oldest first
        # tokens of started prompts and ended outputs, divided by the owner's share, by owner
        self._served: dict[str, float] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._loading
        yield from self._preempted
        for queue in self._queues.values():
            yield from queue

    def __contains__(self, sequence: object) -> bool:
        return any(each is sequence for each in self)

    @property
    def has_next(self) -> bool:
        return bool(self._queues or self._preempted)

    def loaded(self, sequence: Sequence) -> None:
        """Makes a sequence eligible whose prefix has been loaded."""
        self._loading.remove(sequence)
        self._count -= 1
        self.add(sequence)

    def add(self, sequence: Sequence, *, is_loading: bool = False) -> None:
        """Adds a sequence to the queue of its owner, by arrival. is_loading: the sequence is not eligible yet. An owner
        without sequences gets no credit for tokens that other owners are served meanwhile."""
        self._count += 1
        if is_loading:
            self._loading.append(sequence)
            return
        owner = sequence.request.owner
        active = {each.request.owner for each in self._running} | {other for _, other in self._queues}
        if not active:
            self._served.clear()
        elif owner not in active:
            served = self._served_now()
            least_served = min(served.get(each, 0.0) for each in active)
            self._served[owner] = max(self._served.get(owner, 0.0), least_served)
        queue = self._queues.setdefault(_queue_key(sequence), deque())
        if queue and queue[-1].order > sequence.order:
            insort(queue, sequence, key=_arrival)
        else:
            queue.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Adds a preempted sequence; it runs before others of its priority."""
        self._preempted.appendleft(sequence)
        self._count += 1

    def first(self) -> Sequence:
        """The next sequence, which stays in the queue. The queue must not be empty."""
        preempted = min(self._preempted, key=lambda each: each.request.priority, default=None)  # of equals the first
        if not self._queues:
            assert preempted is not None
            return preempted
        key = next(iter(self._queues))
        if len(self._queues) > 1:
            served = self._served_now()
            key = min(self._queues, key=lambda each: (each[0], served.get(each[1], 0.0), self._queues[each][0].order))
        return preempted if preempted is not None and preempted.request.priority <= key[0] else self._queues[key][0]

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that is admitted or has ended."""
        if sequence in self._preempted:
            self._preempted.remove(sequence)
        elif sequence in self._loading:
            self._loading.remove(sequence)
        else:
            queue = self._queues[_queue_key(sequence)]
            queue.remove(sequence)
            if not queue:
                del self._queues[_queue_key(sequence)]
        self._count -= 1

    def charge(self, sequence: Sequence, tokens: int) -> None:
        """Adds to the tokens that the sequence's owner was served."""
        owner = sequence.request.owner
        self._served[owner] = self._served.get(owner, 0.0) + tokens / sequence.request.share

    def _served_now(self) -> dict[str, float]:
        """Tokens served by owner, including the output of running sequences so far."""
        served = dict(self._served)
        for each in self._running:
            owner = each.request.owner
            served[owner] = served.get(owner, 0.0) + each.num_output / each.request.share
        return served


def _arrival(sequence: Sequence) -> int:
    return sequence.order


def _queue_key(sequence: Sequence) -> tuple[int, str]:
    return sequence.request.priority, sequence.request.owner


class Scheduler:
    """Continuous batching. When blocks run out, the youngest sequence of the lowest priority is preempted.

    Any budget of at least one row serves every sequence: a sequence joins only if a row is left after all running ones,
    so only the last one can still be in its prompt, and drafts never take a row from sequences after them.
    """

    def __init__(
        self, memory: KVCacheManager, *, max_num_seqs: int, max_num_batched_tokens: int, chunks_prompts: bool = True
    ) -> None:
        """chunks_prompts: a prompt beyond the budget takes several passes; else one pass that exceeds the budget."""
        self.memory, self.chunks_prompts = memory, chunks_prompts
        self.max_num_seqs, self.budget = max_num_seqs, max_num_batched_tokens
        self.running: list[Sequence] = []  # by priority, then by time of joining
        self.waiting = WaitingQueue(self.running)
        self.num_preemptions = 0
        self.prefix_queries = self.prefix_hits = 0  # prompt tokens looked up in the prefix cache, and found

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence, is_loading=self.memory.fetch(sequence))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Span]:
        """Spans of the next pass: running sequences first, then as many waiting ones as fit."""
        for sequence in self.memory.collect():
            self.waiting.loaded(sequence)
        spans: list[Span] = []
        budget, preemptions = self.budget, self.num_preemptions
        running = list(self.running)
        for number, sequence in enumerate(running, 1):
            if self.num_preemptions == preemptions or sequence in self.running:  # not preempted in this step
                budget -= self._extend(sequence, budget, spans, num_following=len(running) - number)
        while self.waiting.has_next and budget > 0 and len(self.running) < self.max_num_seqs:
            # a sequence preempted in this step must wait: admitting it now would preempt the next one
            sequence = self.waiting.first()
            if not self.chunks_prompts:
                budget = max(budget, len(sequence.tokens))
            if self.num_preemptions > preemptions or not self._admit(sequence, max(self.budget, budget)):
                break
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=lambda each: each.request.priority)
            budget -= self._extend(sequence, budget, spans)
        return spans

    def _extend(self, sequence: Sequence, budget: int, spans: list[Span], num_following: int = 0) -> int:
        """Appends the span of a running sequence, cut so that later ones get a row each; returns its number of rows."""
        pending = len(sequence.tokens) - sequence.num_computed
        rows_left = budget - pending - num_following
        if sequence.draft.num_rows > max(rows_left, 0):
            sequence.draft = sequence.draft.cut(max(rows_left, 0))
        num_rows = min(pending + sequence.draft.num_rows, budget - num_following)
        if num_rows > 0 and sequence.request.images:
            num_rows = _whole_images(sequence, num_rows)
        if num_rows <= 0 or not self._make_room(sequence, num_rows):
            return 0
        num_rows = min(num_rows, pending + sequence.draft.num_rows)  # `_make_room` may have dropped the draft
        num_sample = 1 + sequence.draft.num_rows if num_rows >= pending else 0
        spans.append(Span(sequence, sequence.num_computed, num_rows, num_sample))
        return num_rows

    def _make_room(self, sequence: Sequence, num_rows: int) -> bool:
        """Reserves blocks for the rows: drops the draft, then preempts from the youngest to the sequence itself."""
        if self.memory.reserve(sequence, sequence.num_computed + num_rows):
            return True
        num_rows -= sequence.draft.num_rows
        sequence.draft = Draft()
        while not self.memory.reserve(sequence, sequence.num_computed + num_rows):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.memory.release(sequence)
        sequence.draft = Draft()
        self.waiting.put_back(sequence)
        self.num_preemptions += 1

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Attaches the cached prefix. Returns False, and gives the prefix back, if no further block is free."""
        cached = self.memory.attach_prefix(sequence)
        if not self.memory.reserve(sequence, min(len(sequence.tokens), cached + budget)):
            self.memory.release(sequence)
            return False
        self.memory.attached(sequence)
        if not sequence.admitted:
            sequence.admitted, sequence.num_cached, sequence.scheduled_s = True, cached, time.perf_counter()
            self.prefix_queries += sequence.num_prompt
            self.prefix_hits += cached
            self.waiting.charge(sequence, sequence.num_prompt - cached)
        return True

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence, running or waiting, and frees its blocks."""
        self.waiting.charge(sequence, sequence.num_output)
        if sequence in self.running:
            self.running.remove(sequence)
            self.memory.release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self.memory.drop(sequence)


def _whole_images(sequence: Sequence, num_rows: int) -> int:
    """Number of rows that does not split an image whose rows attend to each other: fewer, or if none would be left,
    all of the image, beyond the budget."""
    start = sequence.num_computed
    for placed in sequence.request.images:
        if placed.is_bidirectional and placed.first < start + num_rows < placed.end:
            return placed.first - start if placed.first > start else placed.end - start
    return num_rows
