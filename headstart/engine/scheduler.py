"""Which rows run in the next pass. There is no prefill and no decode phase: each sequence asks for
len(tokens) + len(draft) - num_computed rows, within one token budget."""

from __future__ import annotations

from bisect import insort

from headstart.cache.memory import KVMemory
from headstart.core import Draft, Sequence, Span
from headstart.engine.waiting import Waiting


class Scheduler:
    """Continuous batching; who comes next stands in `waiting`. The youngest sequence of the last priority is preempted
    when blocks run out.

    Any budget from one row on serves everybody: a sequence joins only when a row is left after all that run, so only
    the last one can still be in its prompt and at most `budget` run; drafts never take the row of one behind them.
    """

    def __init__(self, memory: KVMemory, *, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.memory = memory
        self.max_num_seqs, self.budget = max_num_seqs, max_num_batched_tokens
        self.running: list[Sequence] = []  # by priority, then in the order in which they joined
        self.waiting = Waiting(self.running)
        self.num_preemptions = 0
        self.prefix_queries = self.prefix_hits = 0  # prompt tokens looked up, and found

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence, held=self.memory.fetch(sequence))

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Span]:
        """Spans of the next pass: running sequences first, then as many waiting ones as fit."""
        for sequence in self.memory.collect():
            self.waiting.let_go(sequence)
        spans: list[Span] = []
        budget, preemptions = self.budget, self.num_preemptions
        running = list(self.running)
        for number, sequence in enumerate(running, 1):
            if sequence in self.running:  # not preempted by an older one in this very step
                budget -= self._extend(sequence, budget, spans, behind=len(running) - number)
        while self.waiting.has_next and budget > 0 and len(self.running) < self.max_num_seqs:
            # what was preempted in this very step waits: taking it back at once would only evict the next one
            sequence = self.waiting.first()
            if self.num_preemptions > preemptions or not self._admit(sequence):
                break
            self.waiting.remove(sequence)
            insort(self.running, sequence, key=_priority)
            budget -= self._extend(sequence, budget, spans)
        return spans

    def _extend(self, sequence: Sequence, budget: int, spans: list[Span], behind: int = 0) -> int:
        """Append the rows of one running sequence, cut to the budget; returns their number. It leaves a row for
        each of the sequences `behind` it."""
        pending = len(sequence.tokens) - sequence.num_computed
        room = budget - pending - behind
        if len(sequence.draft.tokens) > max(room, 0):
            sequence.draft = sequence.draft.cut(max(room, 0))
        num_rows = min(pending + len(sequence.draft.tokens), budget - behind)
        if num_rows <= 0 or not self._make_room(sequence, num_rows):
            return 0
        num_rows = min(num_rows, pending + len(sequence.draft.tokens))  # the draft may have been dropped
        num_sample = 1 + len(sequence.draft.tokens) if num_rows >= pending else 0
        spans.append(Span(sequence, sequence.num_computed, num_rows, num_sample))
        return num_rows

    def _make_room(self, sequence: Sequence, num_rows: int) -> bool:
        """Blocks for the rows: give up the draft, then preempt from the youngest, then oneself."""
        if self.memory.reserve(sequence, sequence.num_computed + num_rows):
            return True
        num_rows -= len(sequence.draft.tokens)
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

    def _admit(self, sequence: Sequence) -> bool:
        """Attach the cached prefix; refuse (and give it back) when not even one more block is free."""
        cached = self.memory.attach_prefix(sequence)
        if not self.memory.reserve(sequence, min(len(sequence.tokens), cached + self.budget)):
            self.memory.release(sequence)
            return False
        self.memory.attached(sequence)
        if not sequence.admitted:
            sequence.admitted, sequence.num_cached = True, cached
            self.prefix_queries += sequence.num_prompt
            self.prefix_hits += cached
            self.waiting.charge(sequence, sequence.num_prompt - cached)
        return True

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks."""
        self.waiting.charge(sequence, sequence.num_output)
        if sequence in self.running:
            self.running.remove(sequence)
            self.memory.release(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
            self.memory.drop(sequence)


def _priority(sequence: Sequence) -> int:
    return sequence.request.priority
