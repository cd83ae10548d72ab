"""Block drafters (heads/block.py) and P-EAGLE: one pass over the last token and mask tokens drafts a whole block.

The KV cache holds one entry per committed token, at the token's slot: a block drafter computes it from the trunk's
hidden states ("features"), a P-EAGLE head from pairs (drafters/head.py). Each draft first computes the entries of
tokens committed since the last draft, then runs the block's rows at the slots after them; the next draft overwrites
these slots. All tokens are sampled at once, unless a token's distribution depends on the tokens before it (Markov head,
penalties, masks): then one by one.
"""

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

import numpy as np
from numpy.typing import NDArray

from headstart.core import Float32, Rows, Sequence
from headstart.drafters.base import Drafter, DraftPrograms, DraftRequest, GrowingDraft, TargetModel, no_head
from headstart.drafters.head import vocabulary_parts
from headstart.heads.base import STATES, BlockSpec, Head, HeadNetwork
from headstart.heads.block import BlockModule, MarkovHead
from headstart.kernels.draft_loop import confidence_of
from headstart.kernels.ops import Buffer, KVSpec, Ops, StepInputs, Weight
from headstart.kernels.specs import StateSpec
from headstart.layers.decoder import tap_width
from headstart.layers.linear import LMHead
from headstart.layers.network import Network, NetworkProgram, Pools

FEATURES, BLOCK, MARKOV, PAIRS = "features", "block", "markov", "pairs.0"


@dataclass(frozen=True)
class BlockNetwork:
    """Network of a block drafter, with these programs:

    features: stores the KV of true positions.
    block: the logits of a block's rows, with the Markov head's own columns after them.
    states: the LM head's input for the rows of a block.
    markov: reads a row of `block`, and adds the effect of the token before it to the logits. The output `carry`
    replaces the last columns of the next row.
    The output `confidence` [R, 1] is one term of a confidence logit: of a row in `block`, of a token in `markov`.
    """

    module: BlockModule
    embedding: Weight
    lm_head: LMHead
    hidden_width: int
    first_position: int = 0
    hidden_offset: int = 0
    state_specs: tuple[StateSpec, ...] = ()
    num_recomputed: int = 0

    @property
    def kv_specs(self) -> Seq[KVSpec]:
        return self.module.kv_specs

    def programs(self, pools: Pools) -> Mapping[str, NetworkProgram]:
        module, kv = self.module, pools.kv

        def features(ops: Ops, step: StepInputs) -> dict[str, Buffer]:
            return {"features": module.keep(ops, step.hidden, step.positions, kv)}

        def draft(ops: Ops, step: StepInputs) -> tuple[Buffer, Buffer]:
            embedded = ops.embed(self.embedding, step.token_ids)
            return module.draft(ops, embedded, step.token_ids, step.positions, kv)

        def states(ops: Ops, step: StepInputs) -> dict[str, Buffer]:
            y, _ = draft(ops, step)
            return {"states": ops.take_rows(y, step.logit_rows)}

        def block(ops: Ops, step: StepInputs) -> dict[str, Buffer]:
            every_y, every_stream = draft(ops, step)
            y, confidence = ops.take_rows(every_y, step.logit_rows), module.confidence
            found = {}
            if confidence:
                stream = y if every_stream is every_y else ops.take_rows(every_stream, step.logit_rows)
                found["confidence"] = confidence.of_row(ops, stream)
            logits = module.logits(ops, y, self.lm_head)
            return {"logits": module.markov.row(ops, logits, y) if module.markov else logits, **found}

        def markov(ops: Ops, step: StepInputs) -> dict[str, Buffer]:
            assert module.markov
            embedded = module.markov.embed(ops, step.token_ids)
            confidence = module.confidence.of_token if module.confidence else None
            found = {"confidence": confidence(ops, embedded)} if confidence else {}
            return {**module.markov.step(ops, step.hidden, embedded), **found}

        keep = NetworkProgram(features, self.hidden_width)
        programs = {FEATURES: keep, BLOCK: NetworkProgram(block), STATES: NetworkProgram(states)}
        return programs | ({MARKOV: NetworkProgram(markov, sum(module.markov.widths))} if module.markov else {})


class BlockDrafter(Drafter):
    """Drafts in one pass over the last token and mask tokens; the maximum depth is the block size.

    programs: names of the network's program that fills the KV cache for committed tokens, and of the program that
    computes the logits of a block."""

    costs_per = "pass"
    takes_vocabulary = True

    def __init__(
        self, target: TargetModel, head: Head, network: Network, programs: tuple[str, str],
        token_ids: NDArray[np.int64] | None, markov: MarkovHead | None = None,
    ) -> None:  # fmt: skip
        assert head.spec.block
        self._backend, self._runner, self._budget = target.backend, target.runner, target.token_budget
        self.method, self._spec, self.max_depth = head.spec.kind, head.spec.block, head.spec.depth_limit
        self.tap = None if network.hidden_offset is None else head.spec.tap
        self._token_ids = None if token_ids is None else target.backend.index(token_ids)
        self._network, self._programs, self._markov = target.runner.open(network), programs, markov
        between = [(MARKOV, -1)] if markov else []
        self._steps = DraftPrograms(self._network, programs[1], between, self._token_ids, is_block=True)

    @classmethod
    def attach(cls, target: TargetModel) -> Self:
        head = target.head
        if head is None or head.spec.block is None:
            raise no_head("block drafter")
        ids, embedding, lm_heads = vocabulary_parts(target, head)
        module, hidden = head.modules[0], target.config.hidden_size
        if isinstance(module, BlockModule):
            block = BlockNetwork(module, embedding, lm_heads[0], tap_width(head.spec.tap, hidden))
            return cls(target, head, block, (FEATURES, BLOCK), ids, module.markov)
        return cls(target, head, HeadNetwork(head, hidden, embedding, lm_heads), (PAIRS, PAIRS), ids)

    def num_uncached(self, sequence: Sequence) -> int:
        return max(len(sequence.tokens) - 2 - self._runner.filled(self._network, sequence), 0)

    def propose(self, requests: Seq[DraftRequest]) -> None:
        requests = [request for request in requests if request.should_start]
        if not requests:
            return
        if self._spec.all_causal:  # rows do not depend on later rows: leave out rows that are not worth their cost
            requests = [replace(request, depth=request.pass_depth) for request in requests]
        self._catch_up([request.sequence for request in requests])
        parts = [self._rows(request) for request in requests]
        if left := self._runner.draft(self._steps, requests, parts, self.method):
            self._draft([requests[i] for i in left], [parts[i] for i in left])

    def _draft(self, requests: Seq[DraftRequest], parts: Seq[Rows]) -> None:
        """Drafts with one pass, then samples, the requests that the backend cannot draft in one call."""
        output = self._runner.run(self._network, self._programs[1], parts)
        firsts = accumulate([request.depth for request in requests], initial=0)
        pairs = zip(requests, firsts, strict=False)
        growing = [GrowingDraft.start(request, self.method, first) for request, first in pairs]
        confidence = output.get("confidence")
        confidences = None if confidence is None else self._backend.numpy(confidence)[:, 0].copy()
        if self._markov or any(_depends_on_draft(each.sequence) for each in growing):
            self._draw_in_turn(growing, output["logits"], confidences)
        else:
            self._draw(output["logits"], [(each, i) for each in growing for i in range(each.depth)], confidences)

    def _catch_up(self, sequences: Seq[Sequence]) -> None:
        """Computes the features of all true positions since the last draft, in passes within the token budget."""
        parts: list[Rows] = []
        rows_left = self._budget
        for sequence in sequences:
            start, end = self._runner.filled(self._network, sequence), len(sequence.tokens) - 1
            while start < end:
                count = min(end - start, rows_left)
                parts.append(Rows(sequence, start, self._network_ids(sequence.tokens[start : start + count]), 0))
                start, rows_left = start + count, rows_left - count
                if not rows_left:
                    self._keep(parts)
                    parts, rows_left = [], self._budget
        if parts:
            self._keep(parts)

    def _keep(self, parts: list[Rows]) -> None:
        self._runner.run(self._network, self._programs[0], parts)
        self._runner.fill(self._network, parts)

    def _network_ids(self, tokens: Seq[int]) -> list[int]:
        """The network's ids of the trunk's tokens."""
        return list(tokens)

    def _rows(self, request: DraftRequest) -> Rows:
        anchor = len(request.sequence.tokens) - 1
        (token,) = self._network_ids(request.sequence.tokens[-1:])
        return block_rows(self._spec, request.sequence, anchor, request.depth, token)

    def _draw_in_turn(self, growing: list[GrowingDraft], logits: Buffer, confidences: Float32 | None) -> None:
        """Samples the first token of each draft, then the second of each, and so on."""
        logits = self._backend.rows(logits, np.arange(sum(each.depth for each in growing), dtype=np.int32))
        carry: Buffer = None
        while kept := [i for i, each in enumerate(growing) if each.can_grow]:
            growing = [growing[i] for i in kept]
            rows = np.array([each.row + len(each.draft.tokens) for each in growing], np.int32)
            row_logits = self._backend.rows(logits, rows)
            if carry is not None:
                row_logits[:, -carry.shape[1] :] = carry[kept]
            confidence = None if confidences is None else confidences[rows]
            if self._markov:
                newest = [(each.draft.tokens or each.sequence.tokens)[-1:] for each in growing]
                pairs = zip(growing, newest, strict=True)
                parts = [Rows(each.sequence, len(each.sequence.tokens) - 1, token, 1) for each, token in pairs]
                output = self._runner.run(self._network, MARKOV, parts, hidden=row_logits)
                row_logits, carry = output["logits"], output.get("carry")
                if confidence is not None and "confidence" in output:
                    confidence = confidence + self._backend.numpy(output["confidence"])[:, 0]
            self._draw(row_logits, [(each, len(each.draft.tokens)) for each in growing], confidence)

    def _draw(self, logits: Buffer, draws: Seq[tuple[GrowingDraft, int]], confidences: Float32 | None) -> None:
        """Samples a token for each (draft, index in the draft), with the trunk's sampling parameters and noise.

        A token's score comes from the confidence head if there is one, else it is the token's own probability.
        """
        entries = [
            # tokens not drawn yet do not affect this draw: any id will do
            (each.sequence, len(each.sequence.tokens) + i, (each.draft.tokens + [0] * i)[:i])
            for each, i in draws
        ]
        scored = confidences is None and any(each.gate for each, _ in draws)
        sampled = self._runner.draw(logits, entries, self._token_ids, scored=scored)
        for row, (each, _) in enumerate(draws):
            each.append(sampled, row, None if confidences is None else confidence_of(float(confidences[row])))


def block_rows(spec: BlockSpec, sequence: Sequence, anchor: int, depth: int, token: int) -> Rows:
    """Rows of a block: `token` at position `anchor`, and mask tokens as far as `depth` draft tokens need them."""
    count = spec.rows_for(depth)
    ids = [token, *[spec.mask_token_id] * (count - 1)]
    return Rows(sequence, anchor, ids, depth, visible_end=None if spec.all_causal else anchor + count - 1)


def _depends_on_draft(sequence: Sequence) -> bool:
    """True if sampling a token depends on the tokens drafted before it."""
    constants = sequence.row_constants
    return sequence.is_masked or constants.has_penalties or constants.has_bias


DRAFTER = BlockDrafter
