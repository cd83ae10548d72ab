"""Runs passes: the trunk's, and the drafter's on its behalf. The only place that knows pools and programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from headstart.cache.memory import KVMemory
from headstart.core import Rows, Sampled, Span, TokenLogprob
from headstart.engine.plan import build_plan, span_rows
from headstart.engine.sampling import Entry, allowed_tokens, build_rows
from headstart.kernels.ops import Backend, Buffer, Handle, Pool, Weight
from headstart.layers.decoder import Decoder, Tap
from headstart.layers.mtp import FIRST_PAIR_POSITION


@dataclass(frozen=True)
class Forward:
    """Logits of a trunk pass: `logits` [L, V]; those of span i are rows starts[i] .. starts[i + 1] - 1."""

    logits: Buffer
    starts: Seq[int]


class Runner:
    """One trunk with its pools on one backend. `num_passes` counts trunk forwards, `num_rows` their rows."""

    def __init__(
        self,
        backend: Backend,
        model: Decoder,
        *,
        num_slots: int,
        hidden_size: int,
        vocab_size: int,
        tap: Tap | None,
        memory: KVMemory,
        keep_probs: bool,
    ) -> None:
        self.backend, self.vocab_size = backend, vocab_size
        self._block_size, self._states, self._keep_probs = memory.block_size, memory.states, keep_probs
        self._hidden_pool: Pool = backend.hidden_pool(num_slots, hidden_size) if tap else None
        pools = [backend.kv_pool(num_slots, spec) for spec in model.kv_specs]
        state_pools: list[Pool] = []
        if states := memory.states:
            sizes = states.num_slots, states.num_running, states.num_kept
            state_pools = [backend.state_pool(*sizes, spec) for spec in model.state_specs]
        self._handle = backend.prepare(model.program(pools, self._hidden_pool, tap or "post_norm", state_pools))
        self.num_passes = self.num_rows = 0

    def forward(self, spans: Seq[Span]) -> Forward:
        """One forward for all rows of all spans."""
        parts = [span_rows(span) for span in spans]
        plan = build_plan(parts, self._block_size)
        if self._states:
            plan.states = self._states.plan(spans)
        output = self.backend.run(self._handle, plan)
        self.num_passes += 1
        self.num_rows += plan.num_rows
        return Forward(output["logits"], list(accumulate([part.num_logits for part in parts], initial=0)))

    def sample(self, spans: Seq[Span], forward: Forward) -> tuple[Sampled, list[int]]:
        """Draw every sampling row of the pass at once. Returns the draws and where those of each span start."""
        entries: list[Entry] = []
        rows: list[int] = []
        starts = [0]
        for span, end in zip(spans, forward.starts[1:], strict=True):
            sequence, draft = span.sequence, span.sequence.draft.tokens
            entries += [(sequence, len(sequence.tokens) + i, draft[:i]) for i in range(span.num_sample)]
            rows += range(end - span.num_sample, end)
            starts.append(len(entries))
        if not entries:
            return Sampled(np.zeros(0, np.int64), ()), starts
        logits = forward.logits
        if len(rows) < forward.starts[-1]:  # prompt logprobs have made more logits
            logits = self.backend.rows(logits, np.array(rows, np.int32))
        return self._draw(logits, entries), starts

    def prompt_logprobs(self, span: Span, forward: Forward, index: int) -> list[TokenLogprob]:
        """Of the prompt tokens that this span's rows predict and that no span before it did."""
        sequence = span.sequence
        num_wanted = sequence.request.params.prompt_logprobs
        if num_wanted is None:
            return []
        start = max(span.start, sequence.num_prompt_logprobs)
        known = sequence.request.prompt_ids[start + 1 : span.start + 1 + span.num_rows]
        if not known:
            return []
        sequence.num_prompt_logprobs = start + len(known)
        first = forward.starts[index] + start - span.start
        rows = np.arange(first, first + len(known), dtype=np.int32)
        return self.backend.logprobs(self.backend.rows(forward.logits, rows), np.array(known, np.int64), num_wanted)

    def logprobs(self, span: Span, forward: Forward, index: int, tokens: Seq[int]) -> tuple[TokenLogprob | None, ...]:
        """Of tokens at the first sampling rows of span `index`; nothing when the request asks for none."""
        num_wanted = span.sequence.request.params.logprobs
        if num_wanted is None:
            return (None,) * len(tokens)
        first = forward.starts[index + 1] - span.num_sample
        logits = self.backend.rows(forward.logits, np.arange(first, first + len(tokens), dtype=np.int32))
        return tuple(self.backend.logprobs(logits, np.array(tokens, np.int64), num_wanted))

    def run_head(self, handle: Handle, parts: Seq[Rows], hidden: Buffer = None) -> Mapping[str, Buffer]:
        plan = build_plan(parts, self._block_size, first_position=FIRST_PAIR_POSITION)
        return self.backend.run(handle, plan, hidden_pool=self._hidden_pool, hidden=hidden)

    def draw(
        self, logits: Buffer, entries: Seq[Entry], token_ids: Weight | None = None, *, scored: bool = False
    ) -> Sampled:
        return self._draw(logits, entries, token_ids, 0 if scored else -1)

    def _draw(
        self, logits: Buffer, entries: Seq[Entry], token_ids: Weight | None = None, num_logprobs: int | None = None
    ) -> Sampled:
        rows = build_rows(entries, allowed=allowed_tokens(entries, self.vocab_size), num_logprobs=num_logprobs)
        return self.backend.sample(
            logits, rows, vocab_size=self.vocab_size, token_ids=token_ids, keep_probs=self._keep_probs
        )
