"""The one loop: schedule -> forward -> judge -> commit -> propose. Token ids only; text is somebody else's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import replace
from itertools import count

from headstart.cache.memory import KVMemory
from headstart.config import EngineConfig
from headstart.core import (
    FORCED,
    Delta,
    Draft,
    DraftStats,
    FinishReason,
    Request,
    Sampled,
    Sequence,
    Span,
    Verdict,
)
from headstart.drafters.base import Drafter
from headstart.engine.drafting import Drafting
from headstart.engine.judge import judge_exact, judge_rejection
from headstart.engine.odds import Odds
from headstart.engine.runner import Draws, Forward, Runner
from headstart.engine.scheduler import Scheduler
from headstart.engine.synthetic import SyntheticJudge
from headstart.errors import CapacityError, UsageError

Deliver = Callable[[list[Delta]], None]


class Engine:
    """Runs requests to their end. Not thread-safe: one thread submits and steps."""

    def __init__(
        self, runner: Runner, memory: KVMemory, drafter: Drafter | None, config: EngineConfig, max_length: int
    ) -> None:
        self.runner, self.memory, self.config, self.max_length = runner, memory, config, max_length
        self.scheduler = Scheduler(
            memory, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )
        self.drafting = Drafting(drafter, self.scheduler, config, max_length, runner.vocab_size)
        rates = config.synthetic_rates
        self.synthetic = SyntheticJudge(rates) if rates and drafter else None
        self.reset_stats()
        self._order = count()
        self._live: dict[str, list[Sequence]] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, request: Request) -> list[Sequence]:
        """Queue the n choices of a request. Raises UsageError or CapacityError, leaving everything as it was."""
        if not request.prompt_ids:
            raise UsageError("the prompt is empty", "give at least one token")
        if max(request.prompt_ids) >= self.runner.vocab_size or min(request.prompt_ids) < 0:
            raise UsageError(f"the prompt holds a token id outside 0..{self.runner.vocab_size - 1}")
        if len(request.prompt_ids) >= self.max_length:
            raise CapacityError(
                f"the prompt has {len(request.prompt_ids)} tokens, but the context holds {self.max_length}",
                "shorten the prompt, or raise --max-model-len if the model allows it",
            )
        if request.request_id in self._live:
            raise UsageError(f"a request with id {request.request_id!r} is running")
        if request.depth is not None and request.depth < 0:
            raise UsageError(f"depth is {request.depth}, but must be at least 0", "0 is plain decoding")
        if (request.depth or 0) > self.drafting.max_depth and self.drafting.drafter:
            raise UsageError(f"depth is {request.depth}, but the drafter's limit is {self.drafting.max_depth}")
        sequences = [self._start(request, choice) for choice in range(request.params.n)]
        self._live[request.request_id] = list(sequences)
        for sequence in sequences:
            self.scheduler.add(sequence)
        return sequences

    def _start(self, request: Request, choice: int) -> Sequence:
        constraint = request.constraint.copy() if request.constraint is not None else None
        sequence = Sequence(request, choice, list(request.prompt_ids), next(self._order), constraint=constraint)
        sequence.stats = self._new_stats()
        return sequence

    def _new_stats(self) -> DraftStats:
        return DraftStats(synthetic=self.synthetic.rates if self.synthetic else ())

    @property
    def live(self) -> set[str]:
        """Ids of the requests that run or wait."""
        return set(self._live)

    def change_drafter(self, drafter: Drafter) -> None:
        """Another one over the same networks: nothing of what the old one stored, or of how good it was, holds."""
        self.memory.unfill(self.scheduler.running)
        self.drafting.drafter, self.drafting.auto.odds = drafter, Odds()
        self.judged = self._new_stats()

    def reset_stats(self) -> None:
        """Count from here on. `judged`: of ordinary texts at the engine's own depth. `seconds`: in trunk passes, in
        drafts, in the rest of steps."""
        self.stats, self.judged = self._new_stats(), self._new_stats()
        scheduler = self.scheduler
        scheduler.prefix_queries = scheduler.prefix_hits = scheduler.num_preemptions = 0
        self.seconds = {"verify": 0.0, "draft": 0.0, "host": 0.0}

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Stop a request, or one choice of it, and free its blocks. Unknown ids are ignored: it may just have ended."""
        for sequence in list(self._live.get(request_id, ())):
            if choice is None or sequence.choice == choice:
                self._finish(sequence, "abort")

    def step(self, deliver: Deliver) -> None:
        """One pass. Committed tokens are delivered before the next draft is made."""
        begun = time.perf_counter()
        spans = self.scheduler.schedule()
        if not spans:
            self.memory.wait()
            return
        scheduled = time.perf_counter()
        forward = self.runner.forward(spans)
        self.runner.pool(spans, forward)
        draws = self.runner.draws(spans, forward)
        self.drafting.begin(spans, draws, self.synthetic)
        computed = time.perf_counter()
        verdicts = self._judge(spans, forward, draws)
        deltas = [delta for delta in self._commit(spans, verdicts, forward) if delta]
        committed = time.perf_counter()
        deliver(deltas)
        delivered = time.perf_counter()
        self.drafting.propose([span.sequence for span in spans])
        drafted = time.perf_counter()
        self.seconds["verify"] += computed - scheduled
        self.seconds["draft"] += drafted - delivered
        self.seconds["host"] += scheduled - begun + delivered - computed
        emitted = sum([len(delta.tokens) for delta in deltas])
        self.drafting.learn(spans, emitted, committed - begun, drafted - delivered)

    def _judge(self, spans: Seq[Span], forward: Forward, draws: Draws) -> list[Verdict]:
        sampled, starts = draws.sampled(), draws.starts
        if sampled.probs is None and self.synthetic is None:
            tokens = sampled.tokens.tolist()
            return [self._exact(*each, tokens, sampled) for each in zip(spans, starts, strict=False)]
        places = enumerate(zip(spans, starts, strict=False))
        return [self._inexact(span, start, sampled, forward, index) for index, (span, start) in places]

    def _exact(self, span: Span, start: int, tokens: list[int], sampled: Sampled) -> Verdict:
        """Rows start .. start + num_sample - 1 of the draws decide over the span's draft."""
        rows = slice(start, start + span.num_sample)
        if not span.num_sample:
            return Verdict((), 0, 0)
        verdict = judge_exact(span.sequence.draft.tokens, tokens[rows], sampled.logprobs[rows])
        return _until_failure(verdict, start, sampled.failures)

    def _inexact(self, span: Span, start: int, sampled: Sampled, forward: Forward, index: int) -> Verdict:
        """As `_exact`; what is emitted need not be what was drawn, so logprobs are looked up afterwards."""
        sequence, rows = span.sequence, slice(start, start + span.num_sample)
        if not span.num_sample:
            return Verdict((), 0, 0)
        draft, place = sequence.draft, (sequence.request.seed, sequence.choice, len(sequence.tokens))
        if self.synthetic is None:
            verdict = judge_rejection(draft, sampled.probs[rows], *place)
        elif draft.method == FORCED:
            verdict = judge_exact(draft.tokens, sampled.tokens[rows].tolist())
        else:
            verdict = self.synthetic.judge(draft.tokens, sampled.tokens[rows].tolist(), *place)
        verdict = _until_failure(verdict, start, sampled.failures)
        return replace(verdict, logprobs=self.runner.logprobs(span, forward, index, verdict.tokens))

    def _commit(self, spans: Seq[Span], verdicts: Seq[Verdict], forward: Forward) -> list[Delta | None]:
        return [
            self._commit_one(span, verdict, forward, index)
            for index, (span, verdict) in enumerate(zip(spans, verdicts, strict=True))
        ]

    def _commit_one(self, span: Span, verdict: Verdict, forward: Forward, index: int) -> Delta | None:
        """Append what was decided, up to the end of the text; what was computed for it stays valid."""
        sequence = span.sequence
        prompt_logprobs = self.runner.prompt_logprobs(span, forward, index)
        emitted = self._append(sequence, verdict)
        self.drafting.committed(sequence)
        sequence.num_computed = min(span.start + span.num_rows, len(sequence.tokens) - 1)
        if emitted:
            _count(sequence.stats, sequence.draft, verdict, emitted)
            _count(self.stats, sequence.draft, verdict, emitted)
            if sequence.request.depth is None and sequence.is_ordinary:
                _count(self.judged, sequence.draft, verdict, emitted)
        draft, sequence.draft = sequence.draft, Draft()
        draft.probs = None  # a reader who is late must not keep distributions
        reason = sequence.finish_reason
        if reason != "error":  # what has just been computed may be what is wrong: nobody shall find it in the cache
            self.memory.commit(sequence)
        if reason:
            self._finish(sequence, reason)
        if not emitted and not prompt_logprobs and not reason:
            return None
        return Delta(
            request_id=sequence.request.request_id,
            choice=sequence.choice,
            tokens=verdict.tokens[:emitted],
            logprobs=verdict.logprobs[:emitted],
            prompt_logprobs=tuple(prompt_logprobs),
            finish_reason=reason,
            stats=sequence.stats if reason else None,
            error=sequence.error,
            embedding=sequence.pooled / sequence.num_prompt if reason and sequence.pooled is not None else None,
            draft=draft,
            num_accepted=verdict.num_accepted,
        )

    def _append(self, sequence: Sequence, verdict: Verdict) -> int:
        """Tokens one by one until the text ends or fails; returns how many were taken."""
        stop_ids, room, constraint = sequence.request.stop_ids, self.drafting.room(sequence), sequence.constraint
        for taken, token in enumerate(verdict.tokens, 1):
            if constraint is not None and not constraint.advance(token):
                _fail(sequence, f"the grammar refuses token {token}")
                return taken - 1
            sequence.tokens.append(token)
            if token in stop_ids or (constraint is not None and constraint.done and not constraint.error):
                sequence.finish_reason = "stop"
            elif taken >= room:
                sequence.finish_reason = "length"
            if sequence.finish_reason:
                return taken
        if verdict.error:
            _fail(sequence, verdict.error)
        return len(verdict.tokens)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.scheduler.finish(sequence)
        self.drafting.release(sequence)
        siblings = self._live[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._live[sequence.request.request_id]


def _until_failure(verdict: Verdict, start: int, failures: Mapping[int, str]) -> Verdict:
    """Without the token -1 of a row that failed; the verdict's rows begin at `start`. What fails behind a rejected
    draft is no matter: plain decoding has no such row."""
    if not verdict.tokens or verdict.tokens[-1] >= 0:
        return verdict
    error = failures[start + verdict.num_accepted]
    return replace(verdict, tokens=verdict.tokens[:-1], logprobs=verdict.logprobs[:-1], error=error)


def _fail(sequence: Sequence, reason: str) -> None:
    if sequence.constraint is not None:
        sequence.constraint.masks(())  # finds a dead end, which says more
        reason = sequence.constraint.error or reason
    sequence.finish_reason, sequence.error = "error", reason


def _count(stats: DraftStats, draft: Draft, verdict: Verdict, emitted: int) -> None:
    if draft.method == FORCED:
        stats.forced += min(emitted, verdict.num_accepted)
    else:
        stats.record(verdict.num_drafted, verdict.num_accepted, draft.method)
    stats.passes += 1
    stats.emitted += emitted
