"""Opens networks and runs their passes: the trunk's, and drafters' on their behalf. Only this file knows pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import numpy as np

from headstart.cache.memory import KVMemory
from headstart.cache.parts import STATE, TRUNK
from headstart.core import Draft, Rows, Sampled, Sequence, Span, StateSteps, TokenLogprob
from headstart.drafters.base import Hope, Steps, Wish
from headstart.engine.plan import build_plan, span_rows
from headstart.engine.sampling import Entry, allowed_tokens, build_rows, is_plain, is_steady
from headstart.errors import ModelError
from headstart.kernels.chain import Begun, Chain, Drawn, DrawsEarly, EarlyChain, Judged
from headstart.kernels.ops import Backend, Buffer, Pool, Weight
from headstart.layers.network import FORWARD, Network, Opened, Pools


@dataclass(frozen=True)
class Forward:
    """Logits of a trunk pass: `logits` [L, V]; those of span i are rows starts[i] .. starts[i + 1] - 1. `hidden` [R,
    H]: the states of all rows behind the final norm."""

    logits: Buffer
    starts: Seq[int]
    hidden: Buffer


@dataclass(frozen=True)
class Draws:
    """The draws of a pass, when somebody asks for them; those of span i are from starts[i] on. `begun`: they are being
    made."""

    starts: Seq[int]
    sampled: Callable[[], Sampled]
    begun: Drawn | None = None


@dataclass(frozen=True)
class Early:
    """Drafts that were begun when nobody knew yet what the pass had drawn; lengths of sequences and first rows are
    those of then."""

    begun: Begun
    hopes: Seq[Hope]
    lengths: Seq[int]
    starts: Seq[int]

    def fitting(self, wishes: Seq[Wish], parts: Seq[Rows]) -> dict[int, int]:
        """Which wish (by its place) each of them fulfils."""
        places = {wish.sequence: i for i, wish in enumerate(wishes)}
        found: dict[int, int] = {}
        for at, accepted in enumerate(self.begun.accepted()):
            hope, i = self.hopes[at], places.get(self.hopes[at].sequence)
            if i is None or self.starts[at] > parts[i].start:
                continue
            enough = hope.scored if wishes[i].gate else hope.depth >= wishes[i].depth
            if enough and len(hope.sequence.tokens) == self.lengths[at] + 1 + accepted:
                found[at] = i
        return found


class Runner:
    """Networks on one backend: those that drafters open, then the trunk. `num_passes` counts trunk forwards, `num_rows`
    their rows."""

    memory: KVMemory
    trunk: Opened

    def __init__(self, backend: Backend, vocab_size: int, *, keep_probs: bool) -> None:
        self.backend, self.vocab_size, self._keep_probs = backend, vocab_size, keep_probs
        self.opened: list[Opened] = []
        self._chains: dict[Steps, Chain | None] = {}
        self._early: dict[Steps, Early] = {}
        self._hidden_pool: Pool = None
        self.num_passes = self.num_rows = 0

    def open(self, network: Network) -> Opened:
        """Run a network beside the trunk; it gets its pools in `allocate`. Raises ModelError for recurrent layers: rows
        that were drafted are kept and replayed for the trunk alone."""
        if network.state_specs:
            raise ModelError("a drafter's network cannot have recurrent layers yet", "use --drafter ngram")
        self.opened.append(Opened(network, len(self.opened)))
        return self.opened[-1]

    def allocate(self, trunk: Network, memory: KVMemory, *, num_slots: int, hidden_width: int) -> None:
        """Make the pools of all networks. hidden_width: columns of the trunk's hidden states that are kept; 0: none."""
        self.memory, self.trunk = memory, Opened(trunk, -1)
        if hidden_width:
            self._hidden_pool = self.backend.hidden_pool(num_slots, hidden_width)
        states: list[Pool] = []
        if kept := memory.states:
            sizes = kept.num_slots, kept.num_running, kept.num_kept
            states = [self.backend.state_pool(*sizes, spec) for spec in trunk.state_specs]
        for opened in (self.trunk, *self.opened):
            kv = [self.backend.kv_pool(num_slots, spec) for spec in opened.network.kv_specs]
            self._prepare(opened, Pools(kv, states, self._hidden_pool, self.trunk.pools.kv))

    def _prepare(self, opened: Opened, pools: Pools) -> None:
        opened.pools, self.memory.reaches[opened.index] = pools, opened.reach_back
        programs = opened.network.programs(pools).items()
        opened.handles = {
            name: self.backend.prepare(made.code, hidden_width=made.hidden_width) for name, made in programs
        }

    def stored(self) -> dict[int, list[Pool]]:
        """Pools by what of a block goes to a store together: of the trunk with its hidden states, of each network that
        stores anything, of recurrent states."""
        hidden = [] if self._hidden_pool is None else [self._hidden_pool]
        found = {TRUNK: [*self.trunk.pools.kv, *hidden], STATE: list(self.trunk.pools.states)}
        found |= {opened.index: list(opened.pools.kv) for opened in self.opened}
        return {number: pools for number, pools in found.items() if pools}

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Networks that are opened meanwhile take the places and the pools of those there are. Raises ModelError for
        others than those; nothing has changed then."""
        before, self.opened = self.opened, []
        done = False
        try:
            yield
            if [each.stored for each in self.opened] != [each.stored for each in before]:
                raise ModelError("it stores keys and values of another shape", "start the server again")
            for new, old in zip(self.opened, before, strict=True):
                self._prepare(new, old.pools)
            done = True
        finally:
            if not done:
                self.opened = before

    def run(
        self, opened: Opened, program: str, rows: Seq[Rows], *, hidden: Buffer = None, states: StateSteps | None = None
    ) -> Mapping[str, Buffer]:
        """One pass of a network's program. Its rows read `hidden` [R, width] where that is given, else what is stored
        of the trunk."""
        network = opened.network
        behind = network.behind if hidden is None else None
        plan = build_plan(rows, self.memory.block_size, network.first_position, behind)
        plan.states = states
        stored = None if behind is None else self._hidden_pool
        return self.backend.run(opened.handles[program], plan, hidden_pool=stored, hidden=hidden)

    def fill(self, opened: Opened, rows: Seq[Rows]) -> None:
        """These rows, made from true states, are now the network's KV of their positions."""
        for part in rows:
            self.memory.fill(part.sequence, opened.index, part.start, part.start + len(part.token_ids))

    def filled(self, opened: Opened, sequence: Sequence) -> int:
        """Positions below this one hold the network's KV, as far back as it reaches."""
        reach, size, begin = opened.reach_back, self.memory.block_size, 0
        if 0 < reach < len(sequence.tokens):
            begin = (len(sequence.tokens) - reach) // size * size
        return max(sequence.filled[opened.index], opened.network.first_position, begin)

    def forward(self, spans: Seq[Span]) -> Forward:
        """One trunk pass for all rows of all spans."""
        self._early.clear()
        parts = [span_rows(span) for span in spans]
        states = self.memory.states.plan(spans) if self.memory.states else None
        output = self.run(self.trunk, FORWARD, parts, states=states)
        self.num_passes += 1
        self.num_rows += sum([span.num_rows for span in spans])
        starts = list(accumulate([part.num_logits for part in parts], initial=0))
        return Forward(output["logits"], starts, output["hidden"])

    def draws(self, spans: Seq[Span], forward: Forward) -> Draws:
        """Every sampling row of the pass at once."""
        entries: list[Entry] = []
        rows: list[int] = []
        starts = [0]
        for span, end in zip(spans, forward.starts[1:], strict=True):
            sequence, draft = span.sequence, span.sequence.draft.tokens
            entries += [(sequence, len(sequence.tokens) + i, draft[:i]) for i in range(span.num_sample)]
            rows += range(end - span.num_sample, end)
            starts.append(len(entries))
        if not entries:
            return Draws(starts, lambda: Sampled(np.zeros(0, np.int64), ()))
        logits = forward.logits
        if len(rows) < forward.starts[-1]:  # prompt logprobs have made more logits
            logits = self.backend.rows(logits, np.array(rows, np.int32))
        sampling = build_rows(entries, allowed=allowed_tokens(entries, self.vocab_size))
        size, keep = self.vocab_size, self._keep_probs
        begun, backend = None, self.backend
        if isinstance(backend, DrawsEarly) and not keep:
            begun = backend.begin_sample(logits, sampling, vocab_size=size)
        at_once = partial(self.backend.sample, logits, sampling, vocab_size=size, keep_probs=keep)
        return Draws(starts, begun.wait if begun else at_once, begun)

    def prompt_logprobs(self, span: Span, forward: Forward, index: int) -> list[TokenLogprob]:
        """Of the prompt tokens that this span's rows predict and that no span before it did."""
        sequence = span.sequence
        num_wanted = sequence.prompt_logprobs
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

    def pool(self, spans: Seq[Span], forward: Forward) -> None:
        """Add up the hidden states of prompts that are to be embedded: one position after the other, so that the sum
        does not depend on how the prompt was split. A preempted prompt is computed twice."""
        rows = accumulate([span.num_rows for span in spans], initial=0)
        for span, first in zip(spans, rows, strict=False):
            sequence = span.sequence
            start, end = max(span.start, sequence.num_pooled), min(span.start + span.num_rows, sequence.num_prompt)
            if not sequence.request.embeds or start >= end:
                continue
            wanted = np.arange(first + start - span.start, first + end - span.start, dtype=np.int32)
            for state in self.backend.numpy(self.backend.rows(forward.hidden, wanted)).astype(np.float64):
                sequence.pooled = state if sequence.pooled is None else sequence.pooled + state
            sequence.num_pooled = end

    def logprobs(self, span: Span, forward: Forward, index: int, tokens: Seq[int]) -> tuple[TokenLogprob | None, ...]:
        """Of tokens at the first sampling rows of span `index`; nothing when the request asks for none."""
        num_wanted = span.sequence.request.params.logprobs
        if num_wanted is None:
            return (None,) * len(tokens)
        first = forward.starts[index + 1] - span.num_sample
        logits = self.backend.rows(forward.logits, np.arange(first, first + len(tokens), dtype=np.int32))
        return tuple(self.backend.logprobs(logits, np.array(tokens, np.int64), num_wanted))

    def draft(self, steps: Steps, wishes: Seq[Wish], parts: Seq[Rows], method: str) -> list[int]:
        left = self._begun(steps, wishes, parts, method)
        chain = self._chain(steps) if left else None
        able = [i for i in left if is_steady(wishes[i].sequence)] if chain else []
        if chain and able:
            self._draft(chain, steps, [wishes[i] for i in able], [parts[i] for i in able], method)
        return left if not able else [i for i in left if i not in able]

    def _draft(self, chain: Chain, steps: Steps, wishes: Seq[Wish], parts: Seq[Rows], method: str) -> None:
        entries: list[Entry] = [(wish.sequence, len(wish.sequence.tokens), ()) for wish in wishes]
        network = steps.network.network
        drafts = chain.draft(
            steps.network.handles[steps.first],
            build_plan(parts, self.memory.block_size, network.first_position, network.behind),
            build_rows(entries, allowed=allowed_tokens(entries, self.vocab_size)),
            [wish.depth for wish in wishes],
            [wish.gate.rule(method, wish.depth) if wish.gate else None for wish in wishes],
            hidden_pool=self._hidden_pool,
        )
        for wish, (tokens, scores) in zip(wishes, drafts, strict=True):
            wish.sequence.draft = Draft(tokens, method=method, scores=scores)

    def begin(self, steps: Steps, hopes: Seq[Hope], parts: Seq[Rows], drawn: Drawn) -> None:
        chain = self._chain(steps)
        able = [i for i, hope in enumerate(hopes) if is_plain(hope.sequence)]
        if not able or not isinstance(chain, EarlyChain):
            return
        hopes, parts = [hopes[i] for i in able], [parts[i] for i in able]
        lengths = [len(hope.sequence.tokens) for hope in hopes]
        network = steps.network.network
        begun = chain.begin(
            steps.network.handles[steps.first],
            build_plan(parts, self.memory.block_size, network.first_position, network.behind),
            build_rows([(hope.sequence, length + 1, ()) for hope, length in zip(hopes, lengths, strict=True)]),
            [hope.depth for hope in hopes],
            Judged(
                drawn,
                starts=[hope.draw for hope in hopes],
                drafted=[hope.sequence.draft.tokens for hope in hopes],
                known=[length - part.start for length, part in zip(lengths, parts, strict=True)],
                accepted=[hope.accepted for hope in hopes],
            ),
            scored=any(hope.scored for hope in hopes),
            hidden_pool=self._hidden_pool,
        )
        self._early[steps] = Early(begun, hopes, lengths, [part.start for part in parts])

    def _begun(self, steps: Steps, wishes: Seq[Wish], parts: Seq[Rows], method: str) -> list[int]:
        """Takes the drafts that `begin` has made; returns the indices of the wishes that are left."""
        early = self._early.pop(steps, None)
        found = early.fitting(wishes, parts) if early else {}
        if not early or not found:
            return list(range(len(wishes)))
        gates = [
            gate.rule(method, wishes[found[at]].depth) if at in found and (gate := wishes[found[at]].gate) else None
            for at in range(len(early.hopes))
        ]
        for at, (tokens, scores) in enumerate(early.begun.drafts(gates)):
            if at in found:
                depth = wishes[found[at]].depth
                early.hopes[at].sequence.draft = Draft(tokens[:depth], method=method, scores=scores[:depth])
        return sorted({*range(len(wishes))} - {*found.values()})

    def _chain(self, steps: Steps) -> Chain | None:
        """Prepared when first asked for: rule `rejection` needs the distributions of each step."""
        if steps not in self._chains:
            handles = steps.network.handles
            others = [(handles[program], before) for program, before in steps.others]
            made = self.backend.prepare_chain(
                others, vocab_size=self.vocab_size, token_ids=steps.token_ids, rows_given=steps.rows_given
            )
            self._chains[steps] = None if self._keep_probs else made
        return self._chains[steps]

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
