"""Drafting between passes: chooses sequences and depths, learns from results, and pauses a failed head."""

import logging
import time
from collections.abc import Mapping, Sequence as Seq

from headstart import registry
from headstart.config import AUTO, MAX_DEPTH, Depth, EngineConfig
from headstart.core import FORCED, Draft, Sequence, Span
from headstart.drafters.base import Drafter, DraftRequest, EarlyDraftRequest, TextLookup
from headstart.engine.acceptance import AcceptanceEstimator
from headstart.engine.costs import Costs, CostSamples, PassShape
from headstart.engine.depth import MAX_LEAVES, AutoDepth, DraftCandidate
from headstart.engine.runner import PassSamples
from headstart.engine.scheduler import Scheduler
from headstart.engine.verify import SyntheticVerifier
from headstart.stats import DraftStats


class Drafting:
    """The engine's drafter, if any, with its depth policy."""

    def __init__(
        self, drafter: Drafter | None, scheduler: Scheduler, config: EngineConfig, max_length: int, vocab_size: int
    ) -> None:
        self.drafter = drafter
        self._scheduler, self._config, self._max_length, self._vocab_size = scheduler, config, max_length, vocab_size
        self.depth: Depth = config.depth  # of requests without their own depth; may be changed at any time
        block = drafter.max_depth if drafter and drafter.costs_per == "pass" else 0
        self.auto = AutoDepth(drafter.method if drafter else "none", block)
        self.num_vocab: int | None = None  # logits that a head computes exactly per drafted token; None: no head
        self.lookup_corpus: TextLookup | None = None  # kept when the head changes
        self.can_branch = False  # drafts may have leaves: the backend draws them, and no layer keeps a recurrent state
        self.samples: CostSamples | None = None  # collects step times during a calibration

    @property
    def has_head(self) -> bool:
        """True if a trained head drafts."""
        return self.auto.method in registry.available("heads")

    @property
    def method(self) -> str:
        return self.drafter.method if self.drafter else "none"

    @property
    def max_depth(self) -> int:
        return self.drafter.max_depth if self.drafter else 0

    @property
    def mean_depth(self) -> float:
        """Drafted tokens per running sequence in the latest step."""
        running = self._scheduler.running
        return sum([len(sequence.draft.tokens) for sequence in running]) / max(len(running), 1)

    def tokens_left(self, sequence: Sequence) -> int:
        """Tokens until the length limit."""
        return min(sequence.request.params.max_tokens - sequence.num_output, self._max_length - len(sequence.tokens))

    def propose(self, sequences: Seq[Sequence]) -> None:
        """Sets drafts of sequences that have computed all tokens but the last, as far as length and blocks allow.
        Tokens that a constraint forces are drafted without the drafter."""
        if self.drafter is None:
            return
        requests = self._make_requests(sequences)
        if not requests:
            return
        learner = self.samples or (self.auto.costs if self.depth == AUTO else None)
        num_uncached = (
            {request.sequence: self.drafter.num_uncached(request.sequence) for request in requests} if learner else {}
        )
        start_s = time.perf_counter()
        self.drafter.propose(requests)
        if learner:
            self._learn_draft(learner, requests, num_uncached, time.perf_counter() - start_s)
        for request in requests:
            sequence = request.sequence
            self._check(sequence.draft, request)
            if request.gate is None:
                del sequence.draft.leaves[MAX_LEAVES:]
            if sequence.constraint is not None:  # rows after a refused token or the end of the text are useless
                sequence.draft = sequence.draft.cut(sequence.constraint.fitting(sequence.draft.tokens))
        if gated := [request for request in requests if request.gate is not None]:
            self.auto.cut(gated)

    def propose_early(self, spans: Seq[Span], pass_samples: PassSamples, synthetic: SyntheticVerifier | None) -> None:
        """Starts drafts while the pass is running, where the backend can; `propose` uses them. With depth `auto` only
        for sequences whose draft in this pass came from the head."""
        if self.drafter is None or pass_samples.pending is None:
            return
        depth_limit, requests = self._config.depth_limit(len(self._scheduler.running)), list[EarlyDraftRequest]()
        for span, draw in zip(spans, pass_samples.starts, strict=False):
            sequence, draft, depth = span.sequence, span.sequence.draft, self._depth_of(span.sequence)
            max_tokens = len(draft.tokens) + 1 if depth == AUTO else depth
            num_tokens = min(self.max_depth, max_tokens, depth_limit, self._draft_room(sequence) - 1)
            is_idle = depth == AUTO and (not draft.tokens or draft.method != self.method)
            if not span.num_sample or num_tokens <= 0 or is_idle or sequence.constraint is not None:
                continue
            if self._reserve(sequence, len(draft.tokens) + 1 + num_tokens):
                draw_place = len(draft.tokens), sequence.request.seed, sequence.choice, len(sequence.tokens)
                num_accepted = synthetic.accepts(*draw_place) if synthetic else None
                requests.append(EarlyDraftRequest(sequence, num_tokens, draw, num_accepted, scored=depth == AUTO))
        if requests:
            self.drafter.propose_early(requests, pass_samples.pending)

    def _check(self, draft: Draft, request: DraftRequest) -> None:
        """Asserts the drafter's contract; an id outside the vocabulary would be read out of bounds."""
        tokens, size = draft.tokens, self._vocab_size
        assert len(tokens) <= request.depth, (
            f"{self.method} drafts {len(tokens)} tokens, but was asked for {request.depth}"
        )
        tokens = [*tokens, *(leaf.token for leaf in draft.leaves)]
        assert not tokens or (min(tokens) >= 0 and max(tokens) < size), f"{self.method} drafts ids past {size - 1}"

    def _make_requests(self, sequences: Seq[Sequence]) -> list[DraftRequest]:
        assert self.drafter is not None
        is_resting = self.depth == AUTO and self.auto.should_skip_step()
        if is_resting:  # only forced tokens, and drafts of requests with their own depth
            sequences = [each for each in sequences if each.constraint is not None or each.request.depth is not None]
        ready = [each for each in sequences if each.finish_reason is None and each.num_computed == len(each.tokens) - 1]
        depth_limit = self._config.depth_limit(len(self._scheduler.running))
        requests, candidates = [], []
        can_pay = False if is_resting else None  # None: not estimated yet
        for sequence in ready:
            depth = self._depth_of(sequence)
            max_tokens = self.drafter.auto_limit if depth == AUTO else min(self.max_depth, depth)
            num_tokens = min(max_tokens, depth_limit, self._draft_room(sequence))
            if num_tokens <= 0:
                continue
            if depth == AUTO and can_pay is None:
                can_pay = self.auto.estimate_costs(self._next_pass(ready))
            if self._force(sequence, is_auto=depth == AUTO) or (depth == AUTO and not can_pay):
                continue
            width = self._width(sequence, num_tokens, is_auto=depth == AUTO)
            if not self._reserve(sequence, num_tokens):
                continue
            if depth == AUTO:
                candidates.append(DraftCandidate(sequence, num_tokens, self.drafter.num_uncached(sequence), width))
            else:
                requests.append(DraftRequest(sequence, num_tokens, width=width))
        return requests + self.auto.make_requests(candidates) if candidates else requests

    def _depth_of(self, sequence: Sequence) -> Depth:
        """The request's depth, else the engine's."""
        return self.depth if sequence.request.depth is None else sequence.request.depth

    def _width(self, sequence: Sequence, depth: int, *, is_auto: bool) -> int:
        """Candidates for each token of a draft; reserves slots for the leaves if there are any. A grammar's states do
        not branch."""
        wanted = self._config.draft_width or (self.auto.width if is_auto else 1)
        rows = depth + min(MAX_LEAVES, depth * (wanted - 1))
        fits = len(sequence.tokens) + rows <= self._max_length and rows < self._scheduler.budget
        if wanted == 1 or not self.can_branch or sequence.constraint is not None or not fits:
            return 1
        return wanted if self._reserve(sequence, rows) else 1

    def _next_pass(self, ready: Seq[Sequence]) -> PassShape:
        """Expected size of the next pass without drafts."""
        scheduler = self._scheduler
        waiting = scheduler.waiting if len(scheduler.running) < scheduler.max_num_seqs else ()
        pending = sum([len(each.tokens) - each.num_computed for each in (*scheduler.running, *waiting)]) - len(ready)
        reach = sum([len(each.tokens) for each in ready])
        return PassShape(len(ready), max(0, min(pending, scheduler.budget - len(ready))), reach)

    def _force(self, sequence: Sequence, *, is_auto: bool) -> bool:
        """Drafts tokens that are the only allowed ones, which are certain to be accepted; with depth `auto` only if
        that saves time, else whatever the depth."""
        if sequence.constraint is None:
            return False
        limit = min(MAX_DEPTH, self._draft_room(sequence))
        if is_auto and not self.auto.saves_time(limit):  # reading forced tokens takes time
            return False
        tokens = sequence.constraint.forced(limit)
        pays = self.auto.saves_time(len(tokens)) if is_auto else bool(tokens)
        if not pays or not self._reserve(sequence, len(tokens)):
            return False
        sequence.draft = Draft(tokens, method=FORCED)
        return True

    def _reserve(self, sequence: Sequence, depth: int) -> bool:
        return self._scheduler.memory.reserve(sequence, len(sequence.tokens) + depth)

    def _draft_room(self, sequence: Sequence) -> int:
        return min(self.tokens_left(sequence), self._scheduler.budget) - 1

    def learn(self, spans: Seq[Span], emitted: int, pass_s: float, draft_s: float) -> None:
        """Records the time of a step, for depth `auto` or a calibration."""
        if self.samples is None and (self.depth != AUTO or self.drafter is None):
            return
        rows, all_rows, reach, is_own_depth = 0, 0, 0, True
        for span in spans:
            rows += span.num_sample
            all_rows += span.num_rows
            reach += span.num_rows * (span.start + span.num_rows)
            is_own_depth = is_own_depth and span.sequence.request.depth is None
        work = PassShape(rows=rows, prompt_rows=all_rows - rows, reach=reach)
        if self.samples is not None:
            self.samples.record_pass(work, pass_s)
            return
        self.auto.record_step(work, len(spans), emitted if is_own_depth else 0, pass_s, draft_s)

    def _learn_draft(
        self, learner: Costs | CostSamples, requests: Seq[DraftRequest], num_uncached: Mapping[Sequence, int],
        seconds: float,
    ) -> None:  # fmt: skip
        """Records the time of a draft, by the number of sequences in each draft step; free drafts do not count."""
        assert self.drafter is not None
        drafts = [request.sequence for request in requests if request.sequence.draft.method == self.method]
        lengths = [len(sequence.draft.tokens) for sequence in drafts]
        if not any(lengths):
            return
        steps = [sum([length > i for length in lengths]) for i in range(max(lengths))]
        if self.drafter.costs_per == "pass":
            steps = steps[:1]
        learner.record_draft(steps, sum([num_uncached[sequence] for sequence in drafts]), seconds)

    def record_outcomes(self, sequence: Sequence) -> None:
        """Compares guesses with newly committed tokens."""
        self.auto.acceptance.record_outcomes(sequence)

    def clear(self) -> None:
        """Drops the drafter's texts and statistics of earlier requests."""
        if self.drafter:
            self.drafter.clear()

    def release(self, sequence: Sequence) -> None:
        if self.drafter:
            self.drafter.release(sequence)
            self.auto.release(sequence)


log = logging.getLogger("headstart.engine")
DRAFTS_PER_CHECK = 400  # drafts of ordinary texts between two checks of the acceptance
MIN_ACCEPTED = 0.02  # accepted tokens per draft, below which drafting pauses
STEPS_PER_CHECK = 16  # steps between two looks at the counts
FIRST_PAUSE_S, MAX_PAUSE_S = 300.0, 3600.0
"""Length of the first pause; each further pause is twice as long, up to the maximum. Traffic changes with time."""


class HeadHealth:
    """Pauses drafting while a trained head's acceptance rate is close to zero, and tries the head again later. Lookup
    drafters are never paused: finding nothing is no fault."""

    def __init__(self, drafting: Drafting) -> None:
        self._drafting = drafting
        self.is_enabled = drafting.has_head  # tools that measure acceptance set it to False
        self._depth: Depth = drafting.depth  # before a pause
        self._num_steps = 0
        self._checked: DraftStats | None = None  # counters read by the last check
        self._drafts, self._accepted = 0, 0  # their drafts and accepted tokens at that time
        self._pause_s = FIRST_PAUSE_S
        self.is_paused = False
        self.resume_at = 0.0  # end of the pause, by time.monotonic()

    def head_changed(self) -> None:
        """Ends a pause, since the new head's acceptance rate is unknown."""
        self._pause_s, self.resume_at = FIRST_PAUSE_S, 0.0

    def after_step(self, ordinary_stats: DraftStats) -> None:
        """Checks the acceptance rate now and then. ordinary_stats: of ordinary sequences at the engine's depth."""
        self._num_steps += 1
        if self._num_steps % STEPS_PER_CHECK or not self.is_enabled:
            return
        if ordinary_stats is not self._checked:  # counting began anew
            self._checked, self._drafts, self._accepted = ordinary_stats, 0, 0
        if self.is_paused:
            self._resume(ordinary_stats)
        elif self._drafting.depth and self._drafting.samples is None:
            self._check(ordinary_stats)

    def _resume(self, stats: DraftStats) -> None:
        if time.monotonic() < self.resume_at:
            return
        self._drafts, self._accepted = stats.drafts, stats.accepted
        self.is_paused, self._drafting.depth, self._drafting.auto.acceptance = False, self._depth, AcceptanceEstimator()
        log.info("drafting is tried again")

    def _check(self, stats: DraftStats) -> None:
        """Pauses drafting if the acceptance rate is too low. Depth auto: all guesses count, verified or not."""
        if self._drafting.depth == AUTO:
            drafts, rate = self._drafting.auto.acceptance.first_token_rate(self._drafting.auto.method)
        else:
            drafts = stats.drafts - self._drafts
            rate = (stats.accepted - self._accepted) / max(drafts, 1)
        if drafts < DRAFTS_PER_CHECK:
            return
        self._drafts, self._accepted = stats.drafts, stats.accepted
        if rate >= MIN_ACCEPTED:
            self._pause_s = FIRST_PAUSE_S
            return
        self.is_paused, self._depth, self._drafting.depth = True, self._drafting.depth, 0
        self.resume_at = time.monotonic() + self._pause_s
        log.error(
            "THE HEAD IS DEAD: of %d drafts %.1f %% were accepted. Drafting is off for %.0f minutes; run `headstart "
            "inspect` and `headstart verify`: is it a head of this trunk?", drafts, 100 * rate, self._pause_s / 60,
        )  # fmt: skip
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
