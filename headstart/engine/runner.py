"""Plans and runs the passes of all networks: the trunk's and the drafters'. Owns all pools."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import numpy as np

from headstart.cache.blocks import STATE, TRUNK
from headstart.cache.kv_cache import KVCacheManager
from headstart.cache.recurrent import states_from_zero
from headstart.core import (
    IMAGE_ROW,
    Draft,
    Float32,
    Int32,
    Leaf,
    Paths,
    PlacedImage,
    Request,
    Rows,
    Sampled,
    SamplingParams,
    Sequence,
    Span,
    StateSteps,
    StepPlan,
    TokenLogprob,
    VerifyResult,
)
from headstart.drafters.base import DraftPrograms, DraftRequest, EarlyDraftRequest
from headstart.engine.sampling import Entry, allowed_tokens, build_rows, is_plain, is_steady
from headstart.engine.vision import VisionEncoder
from headstart.errors import ModelError
from headstart.kernels.draft_loop import (
    AsyncSampler,
    DraftLoop,
    EarlyDraftLoop,
    PendingDrafts,
    PendingSample,
    VerifyInputs,
)
from headstart.kernels.ops import Backend, Buffer, Handle, LoraTable, Pool, Weight
from headstart.layers.lora import adapted
from headstart.layers.network import EMBED, FORWARD, FORWARD_EMBEDDED, Network, NetworkHandle, Pools, stored_width
from headstart.wording import option


def build_plan(rows: Seq[Rows], block_size: int, first_position: int = 0, hidden_offset: int | None = None) -> StepPlan:
    """StepPlan of a pass over rows of one network (see layers.network). hidden_offset: the row at position q reads the
    hidden state stored at position q - hidden_offset; None: rows read no hidden state. Plain Python up to the arrays:
    a decode step has a few rows, for which NumPy calls cost more than they save."""
    tables = np.zeros((len(rows), max([len(part.sequence.block_table) for part in rows])), np.int32)
    row_starts, reach, is_special, has_axes = [0], hidden_offset or 0, False, False
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    hidden_slots: list[int] = []
    logit_rows: list[int] = []
    for i, part in enumerate(rows):
        table, start, end = part.sequence.block_table, part.start, part.start + len(part.token_ids)
        tables[i, : len(table)] = table
        token_ids += part.token_ids
        positions += range(start, end)
        row_starts.append(len(positions))
        is_special = is_special or part.visible_end is not None or part.parents is not None
        has_axes = has_axes or (bool(part.sequence.request.images) and part.sequence.request.rope_positions is not None)
        logit_rows += range(len(positions) - part.num_logits, len(positions))
        part_slots = [table[at // block_size] * block_size + at % block_size for at in range(start - reach, end)]
        slots += part_slots[reach:] if reach else part_slots
        if hidden_offset is not None:
            hidden_slots += part_slots[: end - start]
    plan = StepPlan(
        token_ids=np.array(token_ids, np.int32),
        positions=np.array(positions, np.int32),
        slots=np.array(slots, np.int32),
        row_starts=np.array(row_starts, np.int32),
        block_tables=tables,
        logit_rows=np.array(logit_rows, np.int32),
        first_position=first_position,
        hidden_slots=None if hidden_offset is None else np.array(hidden_slots, np.int32),
        block_size=block_size,
    )
    if is_special:
        _set_visibility(plan, rows)
    if has_axes:
        plan.rope_positions = _rope_positions(plan, rows)
    return plan


def _rope_positions(plan: StepPlan, rows: Seq[Rows]) -> Int32:
    """Rotary positions [R, 3]. A head's row at position q pairs the hidden state of position q - first_position with
    the next token; its rotary position is that of the hidden state + first_position."""
    first, bounds = np.int32(plan.first_position), zip(rows, plan.row_starts, plan.row_starts[1:], strict=False)
    found = [part.sequence.request.rope_positions_at(plan.positions[start:end] - first) for part, start, end in bounds]
    return np.ascontiguousarray(np.concatenate(found) + first, np.int32)


def adapter_slots(rows: Seq[Rows]) -> Int32 | None:
    """Slot of each row's adapter [R], -1 without one; None if no row has one."""
    adapters = [part.sequence.request.adapter for part in rows]
    if not any(adapters):
        return None
    slots = [-1 if adapter is None else adapter.slot for adapter in adapters]
    return np.repeat(np.array(slots, np.int32), [len(part.token_ids) for part in rows])


def whole_sequences_plan(texts: Iterable[Seq[int]], first_position: int = 0) -> StepPlan:
    """One pass over whole texts (token ids) from `first_position` on, each with its own blocks, without logits."""
    parts: list[Rows] = []
    block_size, first_block, params = 16, 0, SamplingParams()
    for tokens in texts:
        request = Request(request_id="", prompt_ids=tuple(tokens), params=params, seed=0, stop_ids=frozenset())
        sequence = Sequence(request, 0, list(tokens), 0)
        last_block = first_block + -(-len(tokens) // block_size)
        sequence.block_table.extend(range(first_block, last_block))
        parts.append(Rows(sequence, first_position, sequence.tokens[first_position:], 0))
        first_block = last_block
    plan = build_plan(parts, block_size, first_position)
    plan.states = states_from_zero(np.diff(plan.row_starts))
    return plan


def _set_visibility(plan: StepPlan, rows: Seq[Rows]) -> None:
    """Sets visible_end, visible_start and paths where rows attend beyond themselves or form a tree (see core.Rows)."""
    plan.visible_end = plan.positions.copy()
    starts, slots = [0], list[int]()
    for part, row in zip(rows, plan.row_starts.tolist(), strict=False):
        count = len(part.token_ids)
        if part.visible_end is not None:
            plan.visible_end[row : row + count] = part.visible_end
        if part.visible_start is not None:
            plan.visible_start = plan.positions.copy() if plan.visible_start is None else plan.visible_start
            plan.visible_start[row : row + count] = part.visible_start
        lines: list[list[int]] = []  # for each row of a tree, the rows from its root to itself
        for i, parent in enumerate(part.parents or ()):
            lines.append([*(lines[parent] if parent >= 0 else ()), row + i])
            if len(lines[i]) <= i:  # else all rows before are ancestors, and the block table has their slots
                slots += plan.slots[lines[i]].tolist()
            starts.append(len(slots))
            plan.visible_end[row + i] = plan.positions[row + i] = part.start + len(lines[i]) - 1
        starts += [len(slots)] * (count - len(lines))
    if slots:
        plan.paths = Paths(np.array(starts, np.int32), np.array(slots, np.int32))


def span_rows(span: Span) -> Rows:
    """The trunk's rows of a scheduled span: committed tokens not yet computed, then the draft."""
    sequence, prompt_logprobs = span.sequence, span.sequence.prompt_logprobs
    pending = sequence.tokens[span.start : span.start + span.num_rows]
    draft = sequence.draft
    token_ids = pending + draft.tokens[: span.num_rows - len(pending)] + [leaf.token for leaf in draft.leaves]
    wants_all = prompt_logprobs is not None and sequence.num_prompt_logprobs < sequence.num_prompt - 1
    num_logits = len(token_ids) if wants_all else span.num_sample
    parents = None
    if draft.leaves:
        parents = [*range(-1, len(pending) - 1), *(parent + len(pending) for parent in draft.parents)]
    rows = Rows(sequence, span.start, token_ids, num_logits, parents=parents)
    if sequence.request.images:
        _see_images(span, rows)
    return rows


def images_of(span: Span) -> Iterator[tuple[PlacedImage, int, int]]:
    """Images with rows in a span: (image, first and last + 1 of their positions in the span)."""
    for placed in span.sequence.request.images:
        start, end = max(placed.first, span.start), min(placed.end, span.start + span.num_rows)
        if start < end:
            yield placed, start, end


def _see_images(span: Span, rows: Rows) -> None:
    """Sets visible_end of the rows of images that attend to each other, and visible_start of those with wider
    windows."""
    starts = np.arange(span.start, span.start + span.num_rows, dtype=np.int32)
    ends = starts.copy()
    for placed, start, end in images_of(span):
        inside = slice(start - span.start, end - span.start)
        if placed.is_bidirectional:
            ends[inside], rows.visible_end = placed.end - 1, ends
        if placed.widens_windows:
            starts[inside], rows.visible_start = placed.first, starts


def _marked(span: Span, rows: Rows) -> Rows:
    """The rows with IMAGE_ROW for the token ids of images that are marked."""
    token_ids = list(rows.token_ids)
    for placed, start, end in images_of(span):
        if placed.is_marked:
            token_ids[start - span.start : end - span.start] = [IMAGE_ROW] * (end - start)
    return replace(rows, token_ids=token_ids)


@dataclass(frozen=True)
class ForwardOutput:
    """Output of a trunk pass over R rows, L of them with logits, of V tokens."""

    logits: Buffer  # [L, V]
    starts: Seq[int]  # logits of span i are rows starts[i] .. starts[i + 1] - 1
    hidden: Buffer  # [R, H] states after the final norm


@dataclass(frozen=True)
class PassSamples:
    """Sampled tokens of a pass."""

    starts: Seq[int]  # samples of span i begin at starts[i]
    wait: Callable[[], Sampled]  # returns the tokens, computing or awaiting them
    pending: PendingSample | None = None  # set if the backend is already sampling


@dataclass(frozen=True)
class EarlyDrafts:
    """Drafts started before the tokens of the running pass were known."""

    pending: PendingDrafts
    requests: Seq[EarlyDraftRequest]
    lengths: Seq[int]  # [S] tokens of each sequence at that time
    starts: Seq[int]  # [S] first row's position of each sequence

    def match(self, requests: Seq[DraftRequest], parts: Seq[Rows]) -> dict[int, int]:
        """Index of an early draft -> index of the request that it satisfies."""
        indices = {request.sequence: i for i, request in enumerate(requests)}
        matches: dict[int, int] = {}
        for early_index, accepted in enumerate(self.pending.accepted()):
            early, i = self.requests[early_index], indices.get(self.requests[early_index].sequence)
            if i is None or self.starts[early_index] > parts[i].start:
                continue
            is_deep_enough = early.scored if requests[i].gate else early.depth >= requests[i].depth
            if is_deep_enough and len(early.sequence.tokens) == self.lengths[early_index] + 1 + accepted:
                matches[early_index] = i
        return matches


class Runner:
    """Runs the networks of one backend; owns their pools. Implements drafters.base.DraftRunner for drafters."""

    memory: KVCacheManager
    trunk: NetworkHandle

    def __init__(self, backend: Backend, vocab_size: int, *, keep_probs: bool) -> None:
        self.backend, self.vocab_size, self._keep_probs = backend, vocab_size, keep_probs
        self._async = backend if isinstance(backend, AsyncSampler) else None
        self.networks: list[NetworkHandle] = []
        self._draft_loops: dict[DraftPrograms, DraftLoop | None] = {}
        self._early: dict[DraftPrograms, EarlyDrafts] = {}
        self.vision: VisionEncoder | None = None  # None: the model reads text only
        self._adapted: Mapping[str, Handle] = {}  # programs of the trunk with adapters, by name
        self.num_passes = self.num_rows = 0  # trunk passes, and their rows

    def open(self, network: Network, source: NetworkHandle | None = None) -> NetworkHandle:
        """Registers a network beside the trunk; `allocate` makes its pools."""
        self.networks.append(NetworkHandle(network, len(self.networks), source))
        return self.networks[-1]

    def allocate(self, trunk: Network, memory: KVCacheManager, *, num_slots: int) -> None:
        """Allocates the pools of all networks. num_slots: KV slots of each pool."""
        self.memory, self.trunk = memory, NetworkHandle(trunk, -1)
        for handle in (self.trunk, *self.networks):
            states = self._state_pools(handle)
            kv = [self.backend.kv_pool(num_slots, spec) for spec in handle.network.kv_specs]
            width = stored_width(handle.network)
            hidden = self.backend.hidden_pool(num_slots, width) if width else (handle.source or self.trunk).pools.hidden
            self._prepare(handle, Pools(kv, states, hidden, self.trunk.pools.kv))

    def _state_pools(self, handle: NetworkHandle) -> list[Pool]:
        """Pools of a network's recurrent layers. Raises ModelError for a drafter's beside a trunk without such."""
        specs, cache = handle.network.state_specs, self.memory.states
        if not specs:
            return []
        if cache is None:
            what = "a drafter's network cannot have recurrent layers beside a trunk without"
            raise ModelError(what, "use " + option("drafter", "ngram"))
        count = 2 * cache.num_running  # see StateCacheManager.plan_head
        is_trunk = handle is self.trunk
        sizes = (cache.num_slots, cache.num_running, cache.num_kept) if is_trunk else (count, count, 0)
        return [self.backend.state_pool(*sizes, spec) for spec in specs]

    def _prepare(self, handle: NetworkHandle, pools: Pools) -> None:
        handle.pools, self.memory.receptive_fields[handle.index] = pools, handle.receptive_field
        programs = handle.network.programs(pools).items()
        handle.programs = {
            name: self.backend.prepare(program.code, hidden_width=program.hidden_width) for name, program in programs
        }

    def use_adapters(self, tables: Mapping[int, LoraTable]) -> None:
        """Prepares the trunk's programs with these adapters: tables by the id() of a weight."""
        programs = self.trunk.network.programs(self.trunk.pools)
        self._adapted = {
            name: self.backend.prepare(adapted(programs[name].code, tables), hidden_width=programs[name].hidden_width)
            for name in (FORWARD, FORWARD_EMBEDDED)
            if name in programs and tables
        }

    def stored(self) -> dict[int, list[Pool]]:
        """Pools by part number (cache.blocks.BlockPart): TRUNK with hidden states, STATE, each network with KV."""
        pools = {STATE: list(self.trunk.pools.states)}
        for number, handle in ((TRUNK, self.trunk), *((handle.index, handle) for handle in self.networks)):
            pools[number] = [*handle.pools.kv, *([handle.pools.hidden] if stored_width(handle.network) else ())]
        return {number: each for number, each in pools.items() if each}

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Context in which new networks are opened. At its end they take over the pools of the current networks.
        Raises ModelError if the pool specs differ. After any error the current networks stay."""
        before, self.networks = self.networks, []
        try:
            yield
            if [each.pool_specs for each in self.networks] != [each.pool_specs for each in before]:
                raise ModelError("its KV cache has another shape than the old head", "start the server again")
            for new, old in zip(self.networks, before, strict=True):
                self._prepare(new, old.pools)
            self._draft_loops.clear()  # they hold the old networks
        except BaseException:
            self.networks = before
            raise

    def run(
        self, handle: NetworkHandle, program: str, rows: Seq[Rows], *, hidden: Buffer = None,
        states: StateSteps | None = None,
    ) -> Mapping[str, Buffer]:  # fmt: skip
        """Runs one pass of a network's program. Rows read `hidden` [R, width], else the trunk's stored states."""
        network = handle.network
        hidden_offset = network.hidden_offset if hidden is None else None
        plan = build_plan(rows, self.memory.block_size, network.first_position, hidden_offset)
        if handle is not self.trunk and network.state_specs:
            assert self.memory.states
            states = self.memory.states.plan_head(handle.index, rows, network.num_recomputed)
        plan.states = states
        prepared = handle.programs[program]
        if handle is self.trunk and program in self._adapted:
            plan.adapter_slots = adapter_slots(rows)
            prepared = prepared if plan.adapter_slots is None else self._adapted[program]
        stored = None if hidden_offset is None else handle.pools.hidden
        return self.backend.run(prepared, plan, hidden_pool=stored, hidden=hidden)

    def fill(self, handle: NetworkHandle, rows: Seq[Rows]) -> None:
        for part in rows:
            end = part.start + len(part.token_ids) - handle.network.num_recomputed
            if end >= part.start:
                self.memory.fill(part.sequence, handle.index, part.start, end)
            if end > part.start and self.memory.states and handle.network.state_specs:
                self.memory.states.fill_head(part.sequence, handle.index, end)

    def filled(self, handle: NetworkHandle, sequence: Sequence) -> int:
        reach, size, begin = self.memory.receptive_fields[handle.index], self.memory.block_size, 0
        if 0 < reach < len(sequence.tokens):
            begin = (len(sequence.tokens) - reach) // size * size
        return max(sequence.filled[handle.index], handle.network.first_position, begin)

    def forward(self, spans: Seq[Span]) -> ForwardOutput:
        """One trunk pass for all rows of all spans."""
        self._early.clear()
        parts = [span_rows(span) for span in spans]
        states = self.memory.states.plan(spans) if self.memory.states else None
        if self.vision is not None and any(True for span in spans for _ in images_of(span)):
            embedded = self._embed_images(self.vision, spans, parts)
            marked = [_marked(*each) for each in zip(spans, parts, strict=True)]
            output = self.run(self.trunk, FORWARD_EMBEDDED, marked, hidden=embedded, states=states)
        else:
            output = self.run(self.trunk, FORWARD, parts, states=states)
        self.num_passes += 1
        self.num_rows += sum([span.num_rows for span in spans])
        starts = list(accumulate([part.num_logits for part in parts], initial=0))
        return ForwardOutput(output["logits"], starts, output["hidden"])

    def _embed_images(self, vision: VisionEncoder, spans: Seq[Span], parts: Seq[Rows]) -> Buffer:
        """Input of the first layer [R, H]: embeddings of tokens, and features in the rows of images; beside it the
        features that are added to the output of the first layers, 0 in other rows."""
        starts = accumulate([span.num_rows for span in spans], initial=0)
        rows, features = list[Int32](), list[Float32]()
        for span, row in zip(spans, starts, strict=False):
            for placed, start, end in images_of(span):
                first = placed.offset + start - placed.first
                rows.append(np.arange(row + start - span.start, row + end - span.start, dtype=np.int32))
                features.append(vision.features(placed.image)[first : first + end - start])
        values = np.concatenate(features)
        embedded = self.backend.numpy(self.run(self.trunk, EMBED, parts)["embedded"])
        inputs = np.zeros((len(embedded), values.shape[1]), np.float32)
        inputs[:, : embedded.shape[1]] = embedded
        inputs[np.concatenate(rows)] = values
        return self.backend.buffer(inputs)

    def keep_leaves(self, spans: Seq[Span], results: Seq[VerifyResult]) -> None:
        """Copies KV and hidden states of accepted leaves to the slots of their positions."""
        sources, targets = list[int](), list[int]()
        for span, result in zip(spans, results, strict=True):
            if result.leaf is not None:
                first, table, size = span.start + span.num_rows, span.sequence.block_table, self.memory.block_size
                source = first - len(span.sequence.draft.leaves) + result.leaf
                target = first - span.num_sample + result.num_accepted
                for at, slots in ((source, sources), (target, targets)):
                    slots.append(table[at // size] * size + at % size)
        if not sources:
            return
        self.backend.copy_rows(self.trunk.pools.kv, np.array(sources, np.int32), np.array(targets, np.int32))
        if (hidden := self.trunk.pools.hidden) is not None:
            for source, target in zip(sources, targets, strict=True):
                self.backend.write_slots(hidden, target, self.backend.read_slots(hidden, source, 1))

    def sample(self, spans: Seq[Span], forward: ForwardOutput) -> PassSamples:
        """Samples all sampling rows of the pass at once."""
        entries: list[Entry] = []
        rows: list[int] = []
        starts = [0]
        for span, end in zip(spans, forward.starts[1:], strict=True):
            sequence = span.sequence
            if span.num_sample:
                entries += [
                    (sequence, len(sequence.tokens) + len(prefix), prefix) for prefix in sequence.draft.prefixes
                ]
            rows += range(end - span.num_sample, end)
            starts.append(len(entries))
        if not entries:
            return PassSamples(starts, lambda: Sampled(np.zeros(0, np.int64), ()))
        logits = forward.logits
        if len(rows) < forward.starts[-1]:  # prompt logprobs need more logits than are sampled
            logits = self.backend.rows(logits, np.array(rows, np.int32))
        sampling = build_rows(entries, allowed=allowed_tokens(entries, self.vocab_size))
        size, keep = self.vocab_size, self._keep_probs
        pending = self._async.start_sample(logits, sampling, vocab_size=size) if self._async and not keep else None
        at_once = partial(self.backend.sample, logits, sampling, vocab_size=size, keep_probs=keep)
        return PassSamples(starts, pending.wait if pending else at_once, pending)

    def prompt_logprobs(self, span: Span, forward: ForwardOutput, index: int) -> list[TokenLogprob]:
        """Logprobs of prompt tokens that this span predicts and no earlier span did."""
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

    def pool(self, spans: Seq[Span], forward: ForwardOutput) -> None:
        """Sums the hidden states of prompts of embedding requests, position by position, so that the sum does not
        depend on prefill chunks. A preempted prompt is computed twice but counted once."""
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

    def logprobs(
        self, span: Span, forward: ForwardOutput, index: int, tokens: Seq[int]
    ) -> tuple[TokenLogprob | None, ...]:
        """Logprobs of tokens at the first sampling rows of span `index`; None each if the request asks for none."""
        num_wanted = span.sequence.request.params.logprobs
        if num_wanted is None:
            return (None,) * len(tokens)
        first = forward.starts[index + 1] - span.num_sample
        logits = self.backend.rows(forward.logits, np.arange(first, first + len(tokens), dtype=np.int32))
        return tuple(self.backend.logprobs(logits, np.array(tokens, np.int64), num_wanted))

    def draft(self, steps: DraftPrograms, requests: Seq[DraftRequest], parts: Seq[Rows], method: str) -> list[int]:
        remaining = self._take_early(steps, requests, parts, method)
        loop = self._draft_loop(steps) if remaining else None
        eligible = [i for i in remaining if is_steady(requests[i].sequence)] if loop else []
        if loop and eligible:
            self._draft(loop, steps, [requests[i] for i in eligible], [parts[i] for i in eligible], method)
        return remaining if not eligible else [i for i in remaining if i not in eligible]

    def _draft(
        self, loop: DraftLoop, steps: DraftPrograms, requests: Seq[DraftRequest], parts: Seq[Rows], method: str
    ) -> None:
        entries: list[Entry] = [(request.sequence, len(request.sequence.tokens), ()) for request in requests]
        network = steps.network.network
        drafts = loop.draft(
            steps.network.programs[steps.first],
            build_plan(parts, self.memory.block_size, network.first_position, network.hidden_offset),
            build_rows(entries, allowed=allowed_tokens(entries, self.vocab_size)),
            [request.depth for request in requests],
            [request.gate.rule(method) if request.gate else None for request in requests],
            [request.width for request in requests],
            hidden_pool=steps.network.pools.hidden,
        )
        for request, (tokens, scores, leaves) in zip(requests, drafts, strict=True):
            request.sequence.draft = Draft(
                tokens, method=method, scores=scores, leaves=[Leaf(*each) for each in leaves]
            )

    def draft_early(
        self, steps: DraftPrograms, requests: Seq[EarlyDraftRequest], parts: Seq[Rows], sample: PendingSample
    ) -> None:
        loop = self._draft_loop(steps)
        eligible = [i for i, request in enumerate(requests) if is_plain(request.sequence)]
        if not eligible or not isinstance(loop, EarlyDraftLoop):
            return
        requests, parts = [requests[i] for i in eligible], [parts[i] for i in eligible]
        lengths = [len(request.sequence.tokens) for request in requests]
        network = steps.network.network
        pending = loop.draft_early(
            steps.network.programs[steps.first],
            build_plan(parts, self.memory.block_size, network.first_position, network.hidden_offset),
            build_rows([(request.sequence, length + 1, ()) for request, length in zip(requests, lengths, strict=True)]),
            [request.depth for request in requests],
            VerifyInputs(
                sample,
                starts=[request.draw for request in requests],
                drafted=[request.sequence.draft.tokens for request in requests],
                known=[length - part.start for length, part in zip(lengths, parts, strict=True)],
                accepted=[request.accepted for request in requests],
            ),
            scored=any(request.scored for request in requests),
            hidden_pool=steps.network.pools.hidden,
        )
        self._early[steps] = EarlyDrafts(pending, requests, lengths, [part.start for part in parts])

    def _take_early(
        self, steps: DraftPrograms, requests: Seq[DraftRequest], parts: Seq[Rows], method: str
    ) -> list[int]:
        """Uses the drafts that `draft_early` started; returns the indices of the other requests."""
        early = self._early.pop(steps, None)
        matches = early.match(requests, parts) if early else {}
        if not early or not matches:
            return list(range(len(requests)))
        gates = [
            gate.rule(method) if early_index in matches and (gate := requests[matches[early_index]].gate) else None
            for early_index in range(len(early.requests))
        ]
        for early_index, (tokens, scores) in enumerate(early.pending.drafts(gates)):
            if early_index in matches:
                depth = requests[matches[early_index]].depth
                early.requests[early_index].sequence.draft = Draft(tokens[:depth], method=method, scores=scores[:depth])
        return sorted({*range(len(requests))} - {*matches.values()})

    def _draft_loop(self, steps: DraftPrograms) -> DraftLoop | None:
        """The draft loop of these programs, prepared on first use. None, under rule `rejection` and for networks with
        recurrent states: one pass for each draft step."""
        if steps not in self._draft_loops:
            self._draft_loops[steps] = None
            if not self._keep_probs and not steps.network.network.state_specs:
                handles = steps.network.programs
                others = [(handles[program], before) for program, before in steps.others]
                self._draft_loops[steps] = self.backend.prepare_draft_loop(
                    others, vocab_size=self.vocab_size, token_ids=steps.token_ids, is_block=steps.is_block
                )
        return self._draft_loops[steps]

    def draw(
        self, logits: Buffer, entries: Seq[Entry], token_ids: Weight | None = None, *, scored: bool = False
    ) -> Sampled:
        allowed = allowed_tokens(entries, self.vocab_size)
        rows = build_rows(entries, allowed=allowed, num_logprobs=0 if scored else -1)
        return self.backend.sample(
            logits, rows, vocab_size=self.vocab_size, token_ids=token_ids, keep_probs=self._keep_probs
        )
