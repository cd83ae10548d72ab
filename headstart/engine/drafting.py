"""Drafts for the next pass: who gets one and how deep, what the drafter proposes, and what is learned from it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence as Seq

from headstart import registry
from headstart.config import AUTO, MAX_DEPTH, Depth, EngineConfig
from headstart.core import FORCED, Draft, Sequence, Span
from headstart.drafters.base import Drafter, Hope, Wish
from headstart.engine.costs import Costs, Samples, Work
from headstart.engine.depth import AutoDepth, Room
from headstart.engine.runner import Draws
from headstart.engine.scheduler import Scheduler
from headstart.engine.synthetic import SyntheticJudge


class Drafting:
    """The drafter of an engine, if it has one, between passes."""

    def __init__(
        self, drafter: Drafter | None, scheduler: Scheduler, config: EngineConfig, max_length: int, vocab_size: int
    ) -> None:
        self.drafter = drafter
        self._scheduler, self._config, self._max_length, self._vocab_size = scheduler, config, max_length, vocab_size
        self.depth: Depth = config.depth  # of requests that ask for none; may be changed at any time
        block = drafter.max_depth if drafter and drafter.costs_per == "pass" else 0
        self.auto = AutoDepth(drafter.method if drafter else "none", block)
        self.num_vocab: int | None = None  # tokens whose logits a head computes in full for each draft; None: no head
        self.samples: Samples | None = None  # where a calibration wants the times of steps

    @property
    def has_head(self) -> bool:
        """Does a trained head draft? A lookup that finds nothing is not broken."""
        return self.auto.method in registry.available("heads")

    @property
    def method(self) -> str:
        return self.drafter.method if self.drafter else "none"

    @property
    def max_depth(self) -> int:
        return self.drafter.max_depth if self.drafter else 0

    @property
    def mean_depth(self) -> float:
        """Tokens drafted per sequence of the latest step."""
        running = self._scheduler.running
        return sum([len(sequence.draft.tokens) for sequence in running]) / max(len(running), 1)

    def room(self, sequence: Sequence) -> int:
        """Tokens until the length limit."""
        return min(sequence.request.params.max_tokens - sequence.num_output, self._max_length - len(sequence.tokens))

    def propose(self, sequences: Seq[Sequence]) -> None:
        """Drafts for those whose every token but the last is computed, as far as length and blocks allow. The drafter
        is not asked where a constraint leaves one token only."""
        if self.drafter is None:
            return
        wishes = self._wishes(sequences)
        if not wishes:
            return
        learner = self.samples or (self.auto.costs if self.depth == AUTO else None)
        missed = {wish.sequence: self.drafter.missed(wish.sequence) for wish in wishes} if learner else {}
        begun = time.perf_counter()
        self.drafter.propose(wishes)
        if learner:
            self._learn_draft(learner, wishes, missed, time.perf_counter() - begun)
        for wish in wishes:
            sequence = wish.sequence
            self._check(sequence.draft, wish)
            if sequence.constraint is not None:  # rows behind a refused token, or behind the end, would be for nothing
                sequence.draft = sequence.draft.cut(sequence.constraint.fitting(sequence.draft.tokens))
        if gated := [wish for wish in wishes if wish.gate is not None]:
            self.auto.cut(gated)

    def begin(self, spans: Seq[Span], draws: Draws, synthetic: SyntheticJudge | None) -> None:
        """Drafts behind a pass that is running, where the backend can make them before it is known what the pass has
        drawn; `propose` finds them. With depth `auto` for those that had a draft of the head in this pass."""
        if self.drafter is None or draws.begun is None:
            return
        deepest, hopes = self._config.depth_limit(len(self._scheduler.running)), list[Hope]()
        for span, draw in zip(spans, draws.starts, strict=False):
            sequence, draft = span.sequence, span.sequence.draft
            depth = self.depth if sequence.request.depth is None else sequence.request.depth
            most = len(draft.tokens) + 1 if depth == AUTO else depth
            limit = min(self.max_depth, most, deepest, self._draft_room(sequence) - 1)
            idle = depth == AUTO and (not draft.tokens or draft.method != self.method)
            if not span.num_sample or limit <= 0 or idle or sequence.constraint is not None:
                continue
            if self._reserve(sequence, len(draft.tokens) + 1 + limit):
                place = len(draft.tokens), sequence.request.seed, sequence.choice, len(sequence.tokens)
                known = synthetic.accepts(*place) if synthetic else None
                hopes.append(Hope(sequence, limit, draw, known, scored=depth == AUTO))
        if hopes:
            self.drafter.begin(hopes, draws.begun)

    def _check(self, draft: Draft, wish: Wish) -> None:
        """What a drafter of somebody else's may get wrong: an id outside the vocabulary would be read past its end."""
        tokens, size = draft.tokens, self._vocab_size
        assert len(tokens) <= wish.depth, f"{self.method} drafts {len(tokens)} tokens, but was asked for {wish.depth}"
        assert not tokens or (min(tokens) >= 0 and max(tokens) < size), f"{self.method} drafts ids past {size - 1}"

    def _wishes(self, sequences: Seq[Sequence]) -> list[Wish]:
        assert self.drafter is not None
        ready = [each for each in sequences if each.finish_reason is None and _is_ready(each)]
        deepest = self._config.depth_limit(len(self._scheduler.running))
        wishes, rooms, asks = [], [], None
        for sequence in ready:
            depth = self.depth if sequence.request.depth is None else sequence.request.depth
            most = self.drafter.auto_limit if depth == AUTO else min(self.max_depth, depth)
            limit = min(most, deepest, self._draft_room(sequence))
            if limit <= 0 or self._force(sequence):
                continue
            if depth == AUTO and asks is None:
                asks = not self.auto.skips_step() and self.auto.weigh(self._ahead(ready))
            if (depth == AUTO and not asks) or not self._reserve(sequence, limit):
                continue
            if depth == AUTO:
                rooms.append(Room(sequence, limit, self.drafter.missed(sequence)))
            else:
                wishes.append(Wish(sequence, limit))
        return wishes + self.auto.wishes(rooms) if rooms else wishes

    def _ahead(self, ready: Seq[Sequence]) -> Work:
        """The next pass without drafts, as far as one can tell."""
        scheduler = self._scheduler
        waiting = scheduler.waiting if len(scheduler.running) < scheduler.max_num_seqs else ()
        pending = sum([len(each.tokens) - each.num_computed for each in (*scheduler.running, *waiting)]) - len(ready)
        reach = sum([len(each.tokens) for each in ready])
        return Work(len(ready), max(0, min(pending, scheduler.budget - len(ready))), reach)

    def _force(self, sequence: Sequence) -> bool:
        """Draft what the constraint leaves no choice about: right for sure, so however deep drafts shall be."""
        if sequence.constraint is None:
            return False
        tokens = sequence.constraint.forced(min(MAX_DEPTH, self._draft_room(sequence)))
        if not tokens or not self._reserve(sequence, len(tokens)):
            return False
        sequence.draft = Draft(tokens, method=FORCED)
        return True

    def _reserve(self, sequence: Sequence, depth: int) -> bool:
        return self._scheduler.memory.reserve(sequence, len(sequence.tokens) + depth)

    def _draft_room(self, sequence: Sequence) -> int:
        return min(self.room(sequence), self._scheduler.budget) - 1

    def learn(self, spans: Seq[Span], emitted: int, pass_s: float, draft_s: float) -> None:
        """What a step took, for those who want to know."""
        if self.samples is None and (self.depth != AUTO or self.drafter is None):
            return
        rows = sum([span.num_sample for span in spans])
        work = Work(
            rows=rows,
            prompt_rows=sum([span.num_rows for span in spans]) - rows,
            reach=sum([span.num_rows * (span.start + span.num_rows) for span in spans]),
        )
        if self.samples is not None:
            self.samples.passed(work, pass_s)
            return
        own = all(span.sequence.request.depth is None for span in spans)
        self.auto.stepped(work, len(spans), emitted if own else 0, pass_s, draft_s)

    def _learn_draft(
        self, learner: Costs | Samples, wishes: Seq[Wish], missed: Mapping[Sequence, int], seconds: float
    ) -> None:
        """By how many sequences each draft step had; what a lookup proposed is no work of a head."""
        assert self.drafter is not None
        drafts = [wish.sequence for wish in wishes if wish.sequence.draft.method == self.method]
        if not drafts:
            return
        lengths = [len(sequence.draft.tokens) for sequence in drafts]
        steps = [sum([length > i for length in lengths]) for i in range(max(lengths))]
        if self.drafter.costs_per == "pass":
            steps = steps[:1]
        learner.drafted(steps, sum([missed[sequence] for sequence in drafts]), seconds)

    def committed(self, sequence: Sequence) -> None:
        """Tokens have been committed: learn which guesses were right."""
        self.auto.odds.compare(sequence)

    def forget(self) -> None:
        """Drafts owe nothing to earlier requests from here on."""
        if self.drafter:
            self.drafter.forget()

    def release(self, sequence: Sequence) -> None:
        if self.drafter:
            self.drafter.release(sequence)
            self.auto.release(sequence)


def _is_ready(sequence: Sequence) -> bool:
    """Is every token but the last computed?"""
    return sequence.num_computed == len(sequence.tokens) - 1
