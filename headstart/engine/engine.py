"""The engine loop: schedule -> forward -> verify -> commit -> propose. Works on token ids only."""

import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import replace
from itertools import count
from typing import Any

from headstart.cache.kv_cache import KVCacheManager
from headstart.config import EngineConfig
from headstart.core import (
    FORCED,
    Delta,
    Draft,
    DraftStats,
    FinishReason,
    Request,
    Sequence,
    Span,
    VerifyResult,
)
from headstart.drafters.base import Drafter
from headstart.engine.acceptance import AcceptanceEstimator
from headstart.engine.adapters import Adapters
from headstart.engine.drafting import Drafting, HeadHealth
from headstart.engine.runner import ForwardOutput, PassSamples, Runner
from headstart.engine.scheduler import Scheduler
from headstart.engine.verify import SyntheticVerifier, verify_exact, verify_leaves, verify_rejection
from headstart.errors import CapacityError, ContextError, UsageError
from headstart.wording import option

Deliver = Callable[[list[Delta]], None]


class Engine:
    """Runs requests to completion. Not thread-safe: one thread submits and steps."""

    def __init__(
        self, runner: Runner, memory: KVCacheManager, drafter: Drafter | None, adapters: Adapters, config: EngineConfig,
        max_length: int,
    ) -> None:  # fmt: skip
        self.runner, self.memory, self.adapters = runner, memory, adapters
        self.config, self.max_length = config, max_length
        self.scheduler = Scheduler(
            memory,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunks_prompts=config.enable_chunked_prefill,
        )
        self.drafting = Drafting(drafter, self.scheduler, config, max_length, runner.vocab_size)
        self.drafting.can_branch = runner.backend.draws_leaves and memory.states is None and config.rule == "exact"
        self.head_health = HeadHealth(self.drafting)
        rates = config.synthetic_rates
        self.synthetic = SyntheticVerifier(rates) if rates and drafter else None
        self.reset_stats()
        self._arrivals = count()
        self._live: dict[str, list[Sequence]] = {}

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def submit(self, request: Request, history: Seq[Delta] = ()) -> list[Sequence]:
        """Queues the n choices of a request. history: the request's deltas that another engine has delivered; the text
        continues after them. Raises UsageError or CapacityError; the engine is then unchanged."""
        if not request.prompt_ids:
            raise UsageError("the prompt is empty", "give at least one token")
        if max(request.prompt_ids) >= self.runner.vocab_size or min(request.prompt_ids) < 0:
            raise UsageError(f"the prompt holds a token id outside 0..{self.runner.vocab_size - 1}")
        if len(request.prompt_ids) >= self.max_length:
            hint = "shorten the prompt, or raise " + option("max_model_len") + " if the model allows it"
            raise ContextError(f"it has {len(request.prompt_ids)} tokens", self.max_length, hint)
        if request.request_id in self._live:
            raise UsageError(f"a request with id {request.request_id!r} is running")
        if request.depth is not None and request.depth < 0:
            raise UsageError(f"depth is {request.depth}, but must be at least 0", "0 is plain decoding")
        if (request.depth or 0) > self.drafting.max_depth and self.drafting.drafter:
            raise UsageError(f"depth is {request.depth}, but the drafter's limit is {self.drafting.max_depth}")
        self._check_adapter(request)
        sequences = [self._start(request, choice) for choice in range(request.params.n)]
        for delta in history:
            self._replay(sequences[delta.choice], delta)
        running = [sequence for sequence in sequences if not sequence.finish_reason]
        if running:
            self._live[request.request_id] = list(running)
        for sequence in running:
            self.scheduler.add(sequence)
        return sequences

    def _check_adapter(self, request: Request) -> None:
        """Raises UsageError for an adapter that has been unloaded since the request was made."""
        if request.adapter and self.adapters.loaded.get(request.adapter.name) != request.adapter:
            raise UsageError(f"the LoRA adapter {request.adapter.name!r} was unloaded", "load it again")

    def _replay(self, sequence: Sequence, delta: Delta) -> None:
        """Applies another engine's delta to a new sequence. Raises UsageError if the sequence's grammar refuses the
        tokens, CapacityError if they fill the context."""
        if sequence.constraint is not None and not all(map(sequence.constraint.advance, delta.tokens)):
            raise UsageError("the grammar refuses the text so far")
        sequence.tokens += delta.tokens
        sequence.num_prompt_logprobs += len(delta.prompt_logprobs)
        sequence.finish_reason, sequence.error = delta.finish_reason, delta.error
        sequence.num_cached, sequence.admitted = delta.num_cached, True
        if delta.tokens:
            _count(sequence.stats, delta.draft or Draft(), delta.num_accepted, len(delta.tokens))
        if not delta.finish_reason and len(sequence.tokens) >= self.max_length:
            what = f"the text has {len(sequence.tokens)} tokens so far, but the context holds {self.max_length}"
            raise CapacityError(what, "start all engines with the same " + option("max_model_len"))

    def _start(self, request: Request, choice: int) -> Sequence:
        constraint = request.constraint.copy() if request.constraint is not None else None
        sequence = Sequence(request, choice, list(request.prompt_ids), next(self._arrivals), constraint=constraint)
        sequence.stats = self._new_stats()
        return sequence

    def _new_stats(self) -> DraftStats:
        return DraftStats(synthetic=self.synthetic.rates if self.synthetic else ())

    @property
    def adapter_slots_in_use(self) -> set[int]:
        """Slots of the LoRA adapters that running and waiting requests use."""
        requests = (sequence.request for sequences in self._live.values() for sequence in sequences)
        return {request.adapter.slot for request in requests if request.adapter}

    @property
    def live(self) -> set[str]:
        """Ids of running and waiting requests."""
        return set(self._live)

    def change_drafter(self, drafter: Drafter) -> None:
        """Uses another drafter over the same networks. Drops the old drafter's KV and acceptance estimates."""
        self.memory.unfill(self.scheduler.running)
        self.drafting.drafter, self.drafting.auto.acceptance = drafter, AcceptanceEstimator()
        self.ordinary_stats = self._new_stats()
        self.head_health.head_changed()

    def reset_stats(self) -> None:
        """Sets all counters to zero."""
        self.stats = self._new_stats()
        self.ordinary_stats = self._new_stats()  # of sequences with is_ordinary, at the engine's own depth
        scheduler = self.scheduler
        scheduler.prefix_queries = scheduler.prefix_hits = scheduler.num_preemptions = 0
        self.seconds = {"verify": 0.0, "draft": 0.0, "host": 0.0}  # trunk passes, drafts, the rest of steps

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Ends a request, or one choice of it, and frees its blocks. Ignores unknown ids, which may have ended."""
        for sequence in list(self._live.get(request_id, ())):
            if choice is None or sequence.choice == choice:
                self._finish(sequence, "abort")

    def step(self, deliver: Deliver) -> None:
        """Runs one pass. Committed tokens are delivered before the next draft is made."""
        start_s = time.perf_counter()
        spans = self.scheduler.schedule()
        if not spans:
            self.memory.wait()
            return
        scheduled_s = time.perf_counter()
        forward = self.runner.forward(spans)
        self.runner.pool(spans, forward)
        pass_samples = self.runner.sample(spans, forward)
        self.drafting.propose_early(spans, pass_samples, self.synthetic)
        computed_s = time.perf_counter()
        results = self._verify(spans, forward, pass_samples)
        self.runner.keep_leaves(spans, results)
        pairs = enumerate(zip(spans, results, strict=True))
        commits = [self._commit(span, result, forward, index) for index, (span, result) in pairs]
        deltas = [delta for delta in commits if delta]
        committed_s = time.perf_counter()
        deliver(deltas)
        delivered_s = time.perf_counter()
        self.drafting.propose([span.sequence for span in spans])
        drafted_s = time.perf_counter()
        self.seconds["verify"] += computed_s - scheduled_s
        self.seconds["draft"] += drafted_s - delivered_s
        self.seconds["host"] += scheduled_s - start_s + delivered_s - computed_s
        emitted = sum([len(delta.tokens) for delta in deltas])
        self.drafting.learn(spans, emitted, committed_s - start_s, drafted_s - delivered_s)
        self.head_health.after_step(self.ordinary_stats)

    def _verify(self, spans: Seq[Span], forward: ForwardOutput, pass_samples: PassSamples) -> list[VerifyResult]:
        """Verifies each span's draft with the sampled rows of the span: `num_sample` rows from starts[i] on."""
        sampled, results = pass_samples.wait(), list[VerifyResult]()
        tokens, is_exact = sampled.tokens.tolist(), sampled.probs is None and self.synthetic is None
        for index, (span, start) in enumerate(zip(spans, pass_samples.starts, strict=False)):
            draft, rows = span.sequence.draft, slice(start, start + span.num_sample)
            if not span.num_sample:
                results.append(VerifyResult((), 0, 0))
            elif is_exact:
                result = verify_leaves(draft, tokens[rows], sampled.logprobs[rows])
                results.append(_until_failure(result, draft, start, sampled.failures))
            else:
                probs = None if sampled.probs is None else sampled.probs[rows]
                result = _until_failure(self._verify_inexact(span, tokens[rows], probs), draft, start, sampled.failures)
                # committed tokens may differ from the sampled ones, whose logprobs are known
                results.append(replace(result, logprobs=self.runner.logprobs(span, forward, index, result.tokens)))
        return results

    def _verify_inexact(self, span: Span, tokens: list[int], probs: Any) -> VerifyResult:
        """Verifies a draft under rule `rejection` (probs [num_sample, V]) or with synthetic acceptance."""
        sequence, draft = span.sequence, span.sequence.draft
        place = sequence.request.seed, sequence.choice, len(sequence.tokens)
        if self.synthetic is None:
            return verify_rejection(draft, probs, *place)
        if draft.method == FORCED:
            return verify_exact(draft.tokens, tokens)
        return self.synthetic.verify(draft.tokens, tokens, *place)

    def _commit(self, span: Span, result: VerifyResult, forward: ForwardOutput, index: int) -> Delta | None:
        """Appends the tokens of a result up to the end of the text, and publishes full blocks. Returns the Delta to
        deliver; None if nothing is new."""
        sequence = span.sequence
        prompt_logprobs = self.runner.prompt_logprobs(span, forward, index)
        emitted = self._append(sequence, result)
        self.drafting.record_outcomes(sequence)
        sequence.num_computed = min(span.start + span.num_rows, len(sequence.tokens) - 1)
        if emitted:
            _count(sequence.stats, sequence.draft, result.num_accepted, emitted)
            _count(self.stats, sequence.draft, result.num_accepted, emitted)
            if sequence.request.depth is None and sequence.is_ordinary:
                _count(self.ordinary_stats, sequence.draft, result.num_accepted, emitted)
        draft, sequence.draft = sequence.draft, Draft()
        if result.leaf is not None:
            draft = draft.to_leaf(draft.leaves[result.leaf])
        draft.probs = None  # a slow reader of deltas must not hold distributions in memory
        reason = sequence.finish_reason
        if reason != "error":  # blocks of a failed pass may be wrong: they must not enter the prefix cache
            self.memory.commit(sequence)
        if reason:
            self._finish(sequence, reason)
        if not emitted and not prompt_logprobs and not reason:
            return None
        return Delta(
            request_id=sequence.request.request_id, choice=sequence.choice, tokens=result.tokens[:emitted],
            logprobs=result.logprobs[:emitted], prompt_logprobs=tuple(prompt_logprobs), finish_reason=reason,
            stats=sequence.stats if reason else None, error=sequence.error,
            embedding=sequence.pooled / sequence.num_prompt if reason and sequence.pooled is not None else None,
            draft=draft, num_accepted=result.num_accepted, num_cached=sequence.num_cached,
        )  # fmt: skip

    def _append(self, sequence: Sequence, result: VerifyResult) -> int:
        """Appends tokens until the text ends or fails; returns the number of tokens taken."""
        stop_ids, constraint = sequence.request.stop_ids, sequence.constraint
        tokens_left = self.drafting.tokens_left(sequence)
        if tokens_left <= 0:  # only the prompt's logprobs are wanted
            sequence.finish_reason = "length"
            return 0
        for num_taken, token in enumerate(result.tokens, 1):
            if constraint is not None and not constraint.advance(token):
                _fail(sequence, f"the grammar refuses token {token}")
                return num_taken - 1
            sequence.tokens.append(token)
            if token in stop_ids or (constraint is not None and constraint.done and not constraint.error):
                sequence.finish_reason = "stop"
            elif num_taken >= tokens_left:
                sequence.finish_reason = "length"
            if sequence.finish_reason:
                return num_taken
        if result.error:
            _fail(sequence, result.error)
        return len(result.tokens)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.scheduler.finish(sequence)
        self.drafting.release(sequence)
        siblings = self._live[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._live[sequence.request.request_id]


def _until_failure(result: VerifyResult, draft: Draft, start: int, failures: Mapping[int, str]) -> VerifyResult:
    """Replaces the token -1 of a failed row by the result's error. start: the span's first sampled row. Failures of
    rows after a rejected token are ignored: plain decoding has no such rows."""
    if not result.tokens or result.tokens[-1] >= 0:
        return result
    row = result.num_accepted if result.leaf is None else len(draft.tokens) + 1 + result.leaf
    return replace(result, tokens=result.tokens[:-1], logprobs=result.logprobs[:-1], error=failures[start + row])


def _fail(sequence: Sequence, reason: str) -> None:
    if sequence.constraint is not None:
        sequence.constraint.masks(())  # sets `error` if the grammar is in a dead end: a better reason
        reason = sequence.constraint.error or reason
    sequence.finish_reason, sequence.error = "error", reason


def _count(stats: DraftStats, draft: Draft, num_accepted: int, emitted: int) -> None:
    if draft.method == FORCED:
        stats.forced += min(emitted, num_accepted)
    else:
        stats.record(len(draft.tokens), num_accepted, draft.method, num_leaves=len(draft.leaves))
    stats.passes += 1
    stats.emitted += emitted
