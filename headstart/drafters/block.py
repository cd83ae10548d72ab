"""Block drafters (heads/block.py): one pass over the last token and the mask drafts a whole block.

The features of a true position p lie at slot p of the drafter's KV. A round makes up for those that came since the last
one, then runs the block's rows at the slots behind them, which the next round writes again. Rows that do not hang on
each other are drawn at once; with a Markov head, and where a draw depends on the tokens before it, one by one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import numpy as np

from headstart.core import Float32, Rows, Sequence
from headstart.drafters.base import Drafter, Round, Steps, Target, Wish
from headstart.drafters.head import lm_head_of
from headstart.errors import UsageError
from headstart.heads.base import STATES, BlockSpec, Head
from headstart.heads.block import BlockModule
from headstart.kernels.ops import Buffer, KVSpec, Ops, StepInputs, Weight
from headstart.kernels.states import StateSpec
from headstart.layers.decoder import tap_width
from headstart.layers.network import NetworkProgram, Pools
from headstart.layers.sketch import LMHead

FEATURES, BLOCK, MARKOV = "features", "block", "markov"
MOST_LOGIT = 80.0
"""Where exp ends."""


@dataclass(frozen=True)
class BlockNetwork:
    """Programs: `features` of true positions, which have keys and values only; the rows of a `block`, with their
    logits; `states`, what the LM head reads of such rows; `markov`, logits of rows [R, V'] with what the tokens before
    them add. `confidence` [R, 1]: parts of its logit, of rows and of tokens."""

    module: BlockModule
    embedding: Weight
    lm_head: LMHead
    hidden_width: int
    num_logits: int
    first_position: int = 0
    behind: int = 0
    state_specs: tuple[StateSpec, ...] = ()

    @property
    def kv_specs(self) -> Seq[KVSpec]:
        return self.module.kv_specs

    def programs(self, pools: Pools) -> Mapping[str, NetworkProgram]:
        module, kv = self.module, pools.kv

        def features(ops: Ops, step: StepInputs) -> dict[str, Buffer]:
            return {"features": module.keep(ops, step.hidden, step.positions, kv)}

        def states(ops: Ops, step: StepInputs) -> dict[str, Buffer]:
            embedded = ops.embed(self.embedding, step.token_ids)
            y = module.draft(ops, embedded, step.token_ids, step.positions, kv)
            return {"states": ops.take_rows(y, step.logit_rows)}

        def block(ops: Ops, step: StepInputs) -> dict[str, Buffer]:
            y = states(ops, step)["states"]
            sure = module.confidence
            found = {"confidence": sure.of_row(ops, y)} if sure else {}
            return {"logits": module.logits(ops, y, self.lm_head), **found}

        def markov(ops: Ops, step: StepInputs) -> dict[str, Buffer]:
            assert module.markov
            embedded = module.markov.embed(ops, step.token_ids)
            sure = module.confidence.of_token if module.confidence else None
            found = {"confidence": sure(ops, embedded)} if sure else {}
            return {"logits": module.markov.add(ops, step.hidden, embedded), **found}

        programs = {
            FEATURES: NetworkProgram(features, self.hidden_width),
            BLOCK: NetworkProgram(block),
            STATES: NetworkProgram(states),
        }
        return programs | ({MARKOV: NetworkProgram(markov, self.num_logits)} if module.markov else {})


class BlockDrafter(Drafter):
    """One module; a draft is as deep as its block at most."""

    costs_per = "pass"

    def __init__(self, target: Target, head: Head) -> None:
        assert head.spec.block
        self._backend, self._runner, self._budget = target.backend, target.runner, target.token_budget
        self.method, self._spec, ids = head.spec.kind, head.spec.block, head.draft_token_ids
        sketch = None
        if ids is None:
            ids, sketch = target.vocabulary.token_ids, target.vocabulary.sketch
        self.max_depth, self.tap = head.spec.depth_limit, head.spec.tap
        self._token_ids = None if ids is None else target.backend.index(ids)
        self._module: BlockModule = head.modules[0]
        embedding = target.model.embedding if head.embedding is None else head.embedding
        hidden_size, num_logits = target.config.hidden_size, target.config.vocab_size if ids is None else len(ids)
        width, lm_head = tap_width(head.spec.tap, hidden_size), sketch or lm_head_of(target, head, ids)
        self._network = target.runner.open(BlockNetwork(self._module, embedding, lm_head, width, num_logits))
        between = [(MARKOV, -1)] if self._module.markov else []
        self._steps = Steps(self._network, BLOCK, between, self._token_ids, rows_given=True)

    @classmethod
    def attach(cls, target: Target) -> Self:
        if target.head is None or target.head.spec.block is None:
            raise UsageError("the model has no block drafter", "attach one with --head DIR, or use --drafter ngram")
        return cls(target, target.head)

    def missed(self, sequence: Sequence) -> int:
        return max(len(sequence.tokens) - 2 - self._runner.filled(self._network, sequence), 0)

    def propose(self, wishes: Seq[Wish]) -> None:
        wishes = [wish for wish in wishes if wish.starts]
        if not wishes:
            return
        if self._spec.all_causal:  # no row depends on a later one: those that promise nothing are left out
            wishes = [replace(wish, depth=min(wish.depth, wish.gate.reach)) if wish.gate else wish for wish in wishes]
        self._catch_up([wish.sequence for wish in wishes])
        parts = [self._rows(wish) for wish in wishes]
        if left := self._runner.draft(self._steps, wishes, parts, self.method):
            self._draft([wishes[i] for i in left], [parts[i] for i in left])

    def _draft(self, wishes: Seq[Wish], parts: Seq[Rows]) -> None:
        """One pass, and the draws, for those that a backend has not drafted by itself."""
        output = self._runner.run(self._network, BLOCK, parts)
        firsts = accumulate([wish.depth for wish in wishes], initial=0)
        rounds = [Round.of(wish, self.method, first) for wish, first in zip(wishes, firsts, strict=False)]
        sure = output.get("confidence")
        sureness = None if sure is None else self._backend.numpy(sure)[:, 0].copy()
        if self._module.markov or any(_hangs(each.sequence) for each in rounds):
            self._draw_in_turn(rounds, output["logits"], sureness)
        else:
            self._draw(output["logits"], [(each, i) for each in rounds for i in range(each.depth)], sureness)

    def _catch_up(self, sequences: Seq[Sequence]) -> None:
        """Features of all true positions since the last round, in passes within the token budget."""
        parts: list[Rows] = []
        room = self._budget
        for sequence in sequences:
            start, end = self._runner.filled(self._network, sequence), len(sequence.tokens) - 1
            while start < end:
                count = min(end - start, room)
                parts.append(Rows(sequence, start, sequence.tokens[start : start + count], 0))
                start, room = start + count, room - count
                if not room:
                    self._keep(parts)
                    parts, room = [], self._budget
        if parts:
            self._keep(parts)

    def _keep(self, parts: list[Rows]) -> None:
        self._runner.run(self._network, FEATURES, parts)
        self._runner.fill(self._network, parts)

    def _rows(self, wish: Wish) -> Rows:
        return block_rows(self._spec, wish.sequence, len(wish.sequence.tokens) - 1, wish.depth)

    def _draw_in_turn(self, rounds: list[Round], logits: Buffer, sureness: Float32 | None) -> None:
        """The first token of each draft, then the second of each, and so on."""
        logits = self._backend.rows(logits, np.arange(sum(each.depth for each in rounds), dtype=np.int32))
        while rounds := [each for each in rounds if each.wants_more]:
            rows = np.array([each.row + len(each.draft.tokens) for each in rounds], np.int32)
            of_rows = self._backend.rows(logits, rows)
            sure = None if sureness is None else sureness[rows]
            if self._module.markov:
                before = [(r.draft.tokens or r.sequence.tokens)[-1:] for r in rounds]
                parts = [
                    Rows(r.sequence, len(r.sequence.tokens) - 1, b, 1) for r, b in zip(rounds, before, strict=True)
                ]
                output = self._runner.run(self._network, MARKOV, parts, hidden=of_rows)
                of_rows = output["logits"]
                if sure is not None and "confidence" in output:
                    sure = sure + self._backend.numpy(output["confidence"])[:, 0]
            self._draw(of_rows, [(each, len(each.draft.tokens)) for each in rounds], sure)

    def _draw(self, logits: Buffer, places: Seq[tuple[Round, int]], sureness: Float32 | None) -> None:
        """The trunk's own sampling pipeline and noise for these places of drafts (coupled sampling). A token is scored
        by the confidence head where there is one, else by its own probability."""
        entries = [
            # what is not drawn yet does not matter to this draw
            (each.sequence, len(each.sequence.tokens) + i, (each.draft.tokens + [0] * i)[:i])
            for each, i in places
        ]
        scored = sureness is None and any(each.gate for each, _ in places)
        sampled = self._runner.draw(logits, entries, self._token_ids, scored=scored)
        for row, (each, _) in enumerate(places):
            sure = None if sureness is None else 1 / (1 + math.exp(-max(float(sureness[row]), -MOST_LOGIT)))
            each.take(sampled, row, sure)


def block_rows(spec: BlockSpec, sequence: Sequence, anchor: int, depth: int) -> Rows:
    """The token at position `anchor` and the mask, as far as a draft of this depth takes them."""
    count = spec.rows_for(depth)
    ids = [sequence.tokens[anchor], *[spec.mask_token_id] * (count - 1)]
    return Rows(sequence, anchor, ids, depth, sees=None if spec.all_causal else anchor + count - 1)


def _hangs(sequence: Sequence) -> bool:
    """Does a draw depend on the tokens drafted before it?"""
    constants = sequence.row_constants
    return sequence.is_masked or constants.has_penalties or constants.has_bias


DRAFTER = BlockDrafter
