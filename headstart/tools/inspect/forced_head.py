"""A head over given texts (teacher forcing): the share of positions at which its draft is the trunk's next token."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.core import Float32, StateSteps, StepPlan
from headstart.engine.runner import whole_sequences_plan
from headstart.heads.base import Head, states_of
from headstart.heads.kind import head_kind
from headstart.kernels.ops import Pool, StepInputs
from headstart.layers.build import raw_lm_head
from headstart.layers.decoder import tapped_layers
from headstart.layers.linear import Linear
from headstart.layers.parts import join_pools
from headstart.stats import DraftStats
from headstart.tools.inspect.forced import BLOCK, TeacherForcedTrunk, unlimited

Ids = NDArray[Any]  # whole numbers
BRANCH = 2  # blocks of a branch: positions of drafted tokens, and those before them in the first block


def can_force(head: Head) -> bool:
    """Whether the head drafts token by token from states of the trunk."""
    spec = head.spec
    return head_kind(spec.kind).drafter == "head" and spec.block is None and spec.reader is None


@dataclass(frozen=True)
class Counts:
    """Drafts by position: `tries[i]` of token i after accepted ones, `hits[i]` of them equal to the trunk's token."""

    hits: tuple[int, ...]
    tries: tuple[int, ...]

    @property
    def rates(self) -> list[float]:
        return [hits / tries if tries else 0.0 for hits, tries in zip(self.hits, self.tries, strict=True)]

    def acceptance_length(self, depth: int) -> float:
        """Of drafts of `depth` tokens."""
        return 1 + float(np.cumprod(self.rates[:depth]).sum())

    def first(self) -> DraftStats:
        """Counts of the first position alone."""
        hits, tries = self.hits[0], self.tries[0]
        return DraftStats(drafts=tries, drafted=tries, accepted=hits, per_position=[hits], drafted_at=[tries])


@dataclass(eq=False)
class TeacherForcedHead:
    """A head at all positions of a trunk's texts. The pair (h_p, t_{p+1}) drafts token p + 2."""

    trunk: TeacherForcedTrunk

    def __post_init__(self) -> None:
        texts, starts = self.trunk.texts, self.trunk.plan.row_starts
        self.plan = whole_sequences_plan(self.trunk.texts, 1)
        self.plan.states = None
        self.text_of = np.repeat(np.arange(len(texts)), [len(text) - 1 for text in texts])
        self.rows = starts[self.text_of] + self.plan.positions  # of the trunk: each pair's token
        self.last = starts[self.text_of + 1] - 1  # of the trunk: the last row of the pair's text
        self.tokens = np.concatenate([np.array(text, np.int64) for text in texts])

    def counts(self, head: Head, depth: int = 1) -> Counts:
        """Counts of drafts of up to `depth` tokens."""
        hits, tries = [], []
        for step, (pairs, tokens) in enumerate(self.drafts(head, depth)):
            hits.append(int((tokens == self.trunk.best[self.rows[pairs] + step]).sum()))
            tries.append(len(pairs))
        return Counts(tuple(hits), tuple(tries))

    def drafts(self, head: Head, depth: int) -> Iterator[tuple[Ids, Ids]]:
        """Yields for each draft step (indices [n] of pairs, drafted tokens [n]). A pair takes part in a further step if
        its drafted tokens so far equal both the text and the trunk's argmax."""
        steps, pairs, recycled = _Steps(self, head), np.arange(len(self.rows)), None
        tokens: Ids = np.zeros(0, np.int64)
        for step in range(depth):
            states, recycled = steps.run(step, pairs, tokens, recycled)
            tokens = self._tokens(head, steps.module, states)
            yield pairs, tokens
            targets = self.rows[pairs] + step
            follows = np.minimum(targets + 1, self.last[pairs])
            true = (tokens == self.trunk.best[targets]) & (tokens == self.tokens[follows])
            goes_on = true & (targets < self.last[pairs])
            pairs, recycled, tokens = pairs[goes_on], recycled[goes_on], tokens[goes_on]

    def _tokens(self, head: Head, module: int, states: Float32) -> Ids:
        """Most likely tokens [n] of states [n, H]."""
        if not len(states):
            return np.zeros(0, np.int64)
        ids = head.draft_token_ids
        lm_head = head.lm_heads[min(module, len(head.lm_heads) - 1)] if head.lm_heads else head.lm_head
        found = self.trunk.argmax(states, lm_head or self._shared_lm_head(ids))
        return found if ids is None else ids[found]

    def _shared_lm_head(self, ids: Ids | None) -> Linear:
        """The trunk's LM head, or its rows `ids`."""
        model = self.trunk.model
        if ids is None:
            return model.decoder.lm_head
        rows = raw_lm_head(model.weights, model.config).take_rows(ids)
        return Linear(model.backend.weight(rows, drafts=True))


class _Steps:
    """The draft steps of one head. Drafts that go on are branches: sequences with the pairs' blocks up to the last
    whole one, and blocks of their own."""

    def __init__(self, forced: TeacherForcedHead, head: Head) -> None:
        self.forced, self.head, self.module = forced, head, 0
        self.backend, self._first_block = forced.trunk.backend, int(forced.plan.block_tables.max()) + 1
        slots = BLOCK * (self._first_block + BRANCH * len(forced.rows))
        self._pools: dict[int, list[Pool]] = {
            index: [self.backend.kv_pool(slots, unlimited(spec)) for spec in module.kv_specs]
            for index, module in enumerate(head.modules)
        }
        count = len(forced.rows)  # of state slots, one for each pair
        self._states: dict[int, list[Pool]] = {
            index: [self.backend.state_pool(count, count, 0, spec) for spec in states_of(module)]
            for index, module in enumerate(head.modules)
        }
        self._paired: set[int] = set()  # modules whose pairs are computed

    def run(self, step: int, alive: Ids, drafts: Ids, recycled: Float32 | None) -> tuple[Float32, Float32]:
        """(inputs of the LM head, recycled vectors) of a step for the pairs `alive`, after the tokens `drafts` and the
        vectors of the step before."""
        self.module = self.head.spec.module_of(step) or 0
        if self.head.spec.is_chain:
            return self._chained(step, alive)
        if step == 0:
            return self._pairs(0)
        if self.module not in self._paired and self._pools[self.module]:
            self._pairs(self.module)
        if not len(alive):
            return recycled, recycled  # type: ignore[return-value]
        assert recycled is not None
        return self._forward(self._branches(step, alive, drafts), recycled, recycled=True)

    def _chained(self, step: int, alive: Ids) -> tuple[Float32, Float32]:
        """A step of a chain, whose module reads the text at all pairs: the drafts of `alive` equal it."""
        if step == 0:
            self._outputs = self._pairs(0)
        else:
            tokens = self.forced.tokens[np.minimum(self.forced.rows + step, self.forced.last)]
            plan = replace(self.forced.plan, token_ids=tokens.astype(np.int32))
            self._outputs = self._forward(self._from_zero(plan), self._outputs[1], recycled=True)
        states, recycled = self._outputs
        return states[alive], recycled[alive]

    def _pairs(self, module: int) -> tuple[Float32, Float32]:
        self.module = module
        self._paired.add(module)
        tap, states = self.head.spec.tap, self.forced.trunk.states
        hidden = states["layers" if tapped_layers(tap) else str(tap)][self.forced.rows - 1]
        return self._forward(self._from_zero(self.forced.plan), hidden, recycled=False)

    def _from_zero(self, plan: StepPlan) -> StepPlan:
        """The plan with the module's states, which begin with zeros and are kept behind each pair."""
        if not self._states[self.module]:
            return plan
        ends, last = plan.positions + 1, plan.row_starts[1:] - 1
        slots = np.arange(len(ends), dtype=np.int32)
        firsts, none = ends[plan.row_starts[:-1]] - 1, np.full_like(last, -1)
        return replace(plan, states=StateSteps(last, none, firsts, ends[last], plan.row_starts, ends, slots))

    def _forward(self, plan: StepPlan, hidden: Float32, *, recycled: bool) -> tuple[Float32, Float32]:
        head, spec = self.head, self.head.spec
        table = self.forced.trunk.model.decoder.embedding if head.embedding is None else head.embedding
        module, pool = head.modules[self.module], join_pools([*self._pools[self.module], *self._states[self.module]])

        def code(ops: Any, step: StepInputs, given: Mapping[str, Any]) -> dict[str, Any]:
            embedded = ops.embed(table, step.token_ids)
            step = replace(step, hidden=given["hidden"])
            y, vector = module.forward(ops, spec, embedded, step, pool, recycled=recycled)
            return {"states": y, "recycled": vector}

        found = self.backend.run_once(code, plan, {"hidden": hidden})
        self.backend.release()
        return found["states"], found["recycled"]

    def _branches(self, step: int, alive: Ids, drafts: Ids) -> StepPlan:
        """The plan of one row for each branch."""
        plan, before = self.forced.plan, self.head.spec.rows_before(step)
        starts = plan.positions[alive] + 1  # position of the branch's first own row
        shared = starts // BLOCK
        private = self._first_block + BRANCH * alive
        if before == 0:
            self._copy(alive, starts, shared, private)
        columns = np.arange(plan.block_tables.shape[1] + BRANCH)
        tables = np.pad(plan.block_tables, ((0, 0), (0, BRANCH)))[self.forced.text_of[alive]]
        own = columns - shared[:, None]
        tables = np.where(own < 0, tables, np.where(own < BRANCH, private[:, None] + own, 0)).astype(np.int32)
        positions = starts + before
        rows = np.arange(len(alive), dtype=np.int32)
        states = (alive, alive, positions, positions + 1, np.arange(len(alive) + 1), positions + 1, alive)
        return StepPlan(
            token_ids=drafts.astype(np.int32), positions=positions.astype(np.int32),
            slots=((private + positions // BLOCK - shared) * BLOCK + positions % BLOCK).astype(np.int32),
            row_starts=np.arange(len(alive) + 1, dtype=np.int32), block_tables=tables, logit_rows=rows[:0],
            first_position=1,
            states=StateSteps(*(each.astype(np.int32) for each in states)) if self._states[self.module] else None,
        )  # fmt: skip

    def _copy(self, alive: Ids, starts: Ids, shared: Ids, private: Ids) -> None:
        """Copies the pairs in each branch's first block from the text's blocks."""
        if not (pools := self._pools[self.module]):
            return
        tables = self.forced.plan.block_tables[self.forced.text_of[alive]]
        sources, targets = [], []
        for row, (start, block) in enumerate(zip(starts.tolist(), shared.tolist(), strict=True)):
            inside = np.arange(start - block * BLOCK)
            if len(inside):
                sources.append(tables[row, block] * BLOCK + inside)
                targets.append(private[row] * BLOCK + inside)
        if sources:
            self.backend.copy_rows(pools, *(np.concatenate(each).astype(np.int32) for each in (sources, targets)))
