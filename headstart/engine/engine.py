"""The one loop: schedule -> forward -> judge -> commit -> propose. Token ids only; text is somebody else's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence as Seq
from itertools import count
from typing import Any

from headstart.cache.memory import KVMemory
from headstart.config import EngineConfig
from headstart.core import Delta, Draft, DraftStats, FinishReason, Request, Sequence, Span, TokenLogprob, Verdict
from headstart.drafters._drafter import Drafter
from headstart.engine.judge import judge_exact, judge_rejection
from headstart.engine.runner import Forward, Runner
from headstart.engine.scheduler import Scheduler
from headstart.errors import CapacityError, UsageError

Deliver = Callable[[list[Delta]], None]


class Engine:
    """Runs requests to their end. Not thread-safe: one thread submits and steps."""

    def __init__(
        self, runner: Runner, memory: KVMemory, drafter: Drafter | None, config: EngineConfig, max_length: int
    ) -> None:
        self.runner, self.memory, self.drafter, self.config, self.max_length = (
            runner, memory, drafter, config, max_length,
        )  # fmt: skip
        self.scheduler = Scheduler(
            memory, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        )
        self.stats = DraftStats()
        self.depth = config.depth  # of requests that ask for none; may be changed at any time
        self.seconds = {"verify": 0.0, "draft": 0.0, "host": 0.0}  # in trunk passes, in drafts, in the rest of steps
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
        if (request.depth or 0) > self.max_depth and self.drafter:
            raise UsageError(f"depth is {request.depth}, but the drafter's limit is {self.max_depth}")
        sequences = [
            Sequence(request, choice, list(request.prompt_ids), next(self._order)) for choice in range(request.params.n)
        ]
        self._live[request.request_id] = list(sequences)
        for sequence in sequences:
            self.scheduler.add(sequence)
        return sequences

    @property
    def max_depth(self) -> int:
        return self.drafter.max_depth if self.drafter else 0

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
            return
        scheduled = time.perf_counter()
        forward = self.runner.forward(spans)
        computed = time.perf_counter()
        verdicts = self._judge(spans, forward)
        deliver([delta for delta in self._commit(spans, verdicts, forward) if delta])
        delivered = time.perf_counter()
        self._propose([span.sequence for span in spans])
        self.seconds["verify"] += computed - scheduled
        self.seconds["draft"] += time.perf_counter() - delivered
        self.seconds["host"] += scheduled - begun + delivered - computed

    def _judge(self, spans: Seq[Span], forward: Forward) -> list[Verdict]:
        sampled, starts = self.runner.sample(spans, forward)
        if sampled.probs is None:
            tokens = sampled.tokens.tolist()
            return [self._exact(*each, tokens, sampled.logprobs) for each in zip(spans, starts, strict=False)]
        places = enumerate(zip(spans, starts, strict=False))
        return [self._rejection(span, sampled.probs, start, forward, index) for index, (span, start) in places]

    def _exact(self, span: Span, start: int, tokens: list[int], logprobs: Seq[TokenLogprob | None]) -> Verdict:
        """Rows start .. start + num_sample - 1 of the draws decide over the span's draft."""
        rows = slice(start, start + span.num_sample)
        if not span.num_sample:
            return Verdict((), 0, 0)
        return judge_exact(span.sequence.draft.tokens, tokens[rows], logprobs[rows])

    def _rejection(self, span: Span, probs: Any, start: int, forward: Forward, index: int) -> Verdict:
        """As `_exact`; what is emitted need not be what was drawn, so logprobs are looked up afterwards."""
        sequence = span.sequence
        if not span.num_sample:
            return Verdict((), 0, 0)
        position, rows = len(sequence.tokens), probs[start : start + span.num_sample]
        verdict = judge_rejection(sequence.draft, rows, sequence.request.seed, sequence.choice, position)
        logprobs = self.runner.logprobs(span, forward, index, verdict.tokens)
        return Verdict(verdict.tokens, verdict.num_drafted, verdict.num_accepted, logprobs)

    def _commit(self, spans: Seq[Span], verdicts: Seq[Verdict], forward: Forward) -> list[Delta | None]:
        return [
            self._commit_one(span, verdict, forward, index)
            for index, (span, verdict) in enumerate(zip(spans, verdicts, strict=True))
        ]

    def _commit_one(self, span: Span, verdict: Verdict, forward: Forward, index: int) -> Delta | None:
        """Append what was decided, up to the end of the text; what was computed for it stays valid."""
        sequence = span.sequence
        prompt_logprobs = self.runner.prompt_logprobs(span, forward, index)
        emitted = self._append(sequence, verdict.tokens)
        sequence.num_computed = min(span.start + span.num_rows, len(sequence.tokens) - 1)
        sequence.draft = Draft()
        if emitted:
            for stats in (sequence.stats, self.stats):
                stats.record(verdict.num_drafted, verdict.num_accepted)
                stats.passes += 1
                stats.emitted += emitted
        self.memory.commit(sequence)
        reason = sequence.finish_reason
        if reason:
            self._finish(sequence, reason)
        if not emitted and not prompt_logprobs:
            return None
        return Delta(
            request_id=sequence.request.request_id,
            choice=sequence.choice,
            tokens=verdict.tokens[:emitted],
            logprobs=verdict.logprobs[:emitted],
            prompt_logprobs=tuple(prompt_logprobs),
            finish_reason=reason,
            stats=sequence.stats if reason else None,
        )

    def _append(self, sequence: Sequence, tokens: Seq[int]) -> int:
        """Tokens one by one until a stop id or the length limit; returns how many were taken."""
        stop_ids, room = sequence.request.stop_ids, self._room(sequence)
        for taken, token in enumerate(tokens, 1):
            sequence.tokens.append(token)
            if token in stop_ids:
                sequence.finish_reason = "stop"
            elif taken >= room:
                sequence.finish_reason = "length"
            if sequence.finish_reason:
                return taken
        return len(tokens)

    def _room(self, sequence: Sequence) -> int:
        """Tokens until the length limit."""
        return min(sequence.request.params.max_tokens - sequence.num_output, self.max_length - len(sequence.tokens))

    def _propose(self, sequences: Seq[Sequence]) -> None:
        """Drafts for those whose every token but the last is computed, as far as length and blocks allow."""
        if self.drafter is None:
            return
        wishes = []
        for sequence in sequences:
            ready = sequence.finish_reason is None and sequence.num_computed == len(sequence.tokens) - 1
            depth = self._depth(sequence) if ready else 0
            if depth > 0 and self.memory.reserve(sequence, len(sequence.tokens) + depth):
                wishes.append((sequence, depth))
        if wishes:
            self.drafter.propose(wishes)
        for sequence, depth in wishes:
            assert len(sequence.draft.tokens) <= depth, f"{self.drafter.method} drafts more than it was asked for"

    def _depth(self, sequence: Sequence) -> int:
        wanted = sequence.request.depth
        if wanted is None:
            wanted = self.depth
        return min(wanted, self.max_depth, self._room(sequence) - 1, self.scheduler.budget - 1)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.scheduler.finish(sequence)
        if self.drafter:
            self.drafter.release(sequence)
        siblings = self._live[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._live[sequence.request.request_id]
