"""One batch through the head, unrolled or in blocks: the loss for training, accepted drafts for evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, scaled_dot_product_attention

from headstart.errors import ModelError
from headstart.heads.base import FIRST_PAIR_POSITION, BlockSpec, HeadSpec, Module
from headstart.heads.block import BlockModule
from headstart.kernels.ops import AttentionSpec, Pool, StepInputs
from headstart.layers.decoder import tapped_layers
from headstart.layers.parts import join_pools
from headstart.train.dataset import Batch
from headstart.train.hidden_states import TorchTrunk, to_device, true_positions
from headstart.train.losses import LossTerms, Teacher, all_candidates, distill, likely_candidates, make_teacher
from headstart.train.ops import TrainingKV, TrainOps
from headstart.train.torch_weights import round_int4

CHUNK = 16  # anchors that share one matrix of scores. Their rows do not see each other: those scores are wasted work.


@dataclass(frozen=True, eq=False)
class DraftBlocks:
    """Blocks of g rows at C anchors in each of N chunks."""

    source: Tensor  # [N] sequence of each chunk
    anchors: Tensor  # [N, C] ascending positions
    valid: Tensor  # [N, C, g] rows whose target and all previous targets carry loss; false for anchors that only pad
    rows: Tensor  # flat indices of the valid rows

    def to(self, device: torch.device) -> DraftBlocks:
        parts = (self.source, self.anchors, self.valid, self.rows)
        return DraftBlocks(*(to_device(each.contiguous(), device) for each in parts))

    @property
    def positions(self) -> Tensor:
        """[N, C, g]"""
        return self.anchors[..., None] + torch.arange(self.valid.shape[-1], device=self.anchors.device)

    def gather_rows(self, x: Tensor) -> Tensor:
        """x [B, T, ...] at the position of each row: [N, C, g, ...]; zero past the end."""
        length, positions = x.shape[1], self.positions
        inside = positions < length
        rows = x[self.source[:, None, None], positions.clamp(max=length - 1)]
        return rows * inside.view(*inside.shape, *[1] * (rows.ndim - 3))


def choose_anchors(loss: Tensor, size: int, share: float, seed: int) -> DraftBlocks:
    """Blocks of `size` rows at random anchors: this share of the possible anchors of each sequence. loss [B, T] on the
    host: row p predicts a token of an answer."""
    generator = torch.Generator().manual_seed(seed)
    starts = loss.clone()
    starts[:, 1:] &= loss[:, :-1]  # the anchor is itself a token of an answer: a draft starts only after one
    starts[:, 0] = False
    sources, anchors, real = [], [], []
    for number, row in enumerate(starts):
        places = row.nonzero()[:, 0]
        if not len(places):
            continue
        picked = places[torch.randperm(len(places), generator=generator)[: max(1, round(share * len(places)))]]
        picked = picked.sort().values
        filled = torch.cat((picked, picked[-1:].expand(-len(picked) % CHUNK))).view(-1, CHUNK)
        anchors.append(filled)
        real.append((torch.arange(filled.numel()) < len(picked)).view_as(filled))
        sources += [number] * len(filled)
    empty = torch.zeros(0, CHUNK, dtype=torch.int64)
    blocks = DraftBlocks(
        torch.tensor(sources, dtype=torch.int64),
        torch.cat((empty, *anchors)),
        torch.cat((empty.bool(), *real))[..., None].expand(-1, -1, size),
        empty,
    )
    carries = blocks.gather_rows(loss).cumprod(-1).bool()
    valid = blocks.valid & carries
    return replace(blocks, valid=valid, rows=valid.flatten().nonzero()[:, 0])


class BlockOps(TrainOps):
    """Ops over the features of whole sequences ([B, T, W], stored by each layer), then over the rows of blocks."""

    def __init__(self, blocks: DraftBlocks, length: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(device, dtype)
        self._blocks, self._length = blocks, length
        self._masks: dict[tuple[int, bool], Tensor] = {}

    def attend(
        self, q: Tensor, pool: Pool, spec: AttentionSpec, sinks: Tensor | None = None, chosen: Pool = None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """q [N, C * g, H * D] -> [N, C * g, H * V]."""
        if sinks is not None or bias is not None or spec.softcap or spec.chunk:
            raise ModelError("a block drafter with sinks, biases, a softcap or chunks cannot be trained yet")
        keys, values = (torch.cat((kept[0][self._blocks.source], kept[1]), dim=2) for kept in (pool.keys, pool.values))
        # query heads of a group become rows of one head: their masks are the same
        heads = q.unflatten(-1, (spec.num_kv_heads, -1, spec.head_dim)).permute(0, 2, 3, 1, 4)
        groups = heads.shape[2]
        mask = self._mask(spec.window, spec.causal).repeat(1, 1, groups, 1)
        out: Tensor = scaled_dot_product_attention(heads.flatten(2, 3), keys, values, attn_mask=mask, scale=spec.scale)
        rows: Tensor = out.unflatten(2, (groups, -1)).permute(0, 3, 1, 2, 4).flatten(2)
        return rows

    def _mask(self, window: int, causal: bool) -> Tensor:
        """[N, 1, C * g, T + C * g], added to scores."""
        if (window, causal) not in self._masks:
            blocks, size = self._blocks, self._blocks.valid.shape[-1]
            context = torch.arange(self._length, device=self._device)
            seen = (context < blocks.anchors[..., None])[:, :, None].expand(-1, -1, size, -1)
            rows = torch.arange(CHUNK * size, device=self._device)
            own = rows[:, None] // size == rows // size
            if causal:
                own = own & (rows[:, None] >= rows)
            if window:
                seen = seen & (context > blocks.positions[..., None] - window)
                own = own & (rows[:, None] - rows < window)
            both = torch.cat((seen.flatten(1, 2), own.expand(len(seen), -1, -1)), dim=-1)
            mask = torch.zeros(both.shape, dtype=self._dtype, device=self._device)
            self._masks[window, causal] = mask.masked_fill_(~both, float("-inf"))[:, None]
        return self._masks[window, causal]


@dataclass(frozen=True, eq=False)
class BlockOutputs:
    """Outputs of the drafter at the rows of blocks."""

    blocks: DraftBlocks
    y: Tensor  # [N, C, g, W]
    before: Tensor | None = None  # [N, C, g, r] embeddings of the previous tokens, for the Markov head


def draft_blocks(module: BlockModule, embedding: Tensor, batch: Batch, size: int, share: float) -> BlockOutputs:
    """Run blocks of `size` rows at random anchors of a batch in one pass, teacher-forced on the text.

    An anchor n is a token of an answer. Its rows have positions n, n + 1, ...: the token at n, then mask tokens. They
    see the features of the positions before n, and each other. The Markov head reads the token before each row from
    the text, as it is known at run time.
    """
    spec: BlockSpec = module.spec
    streams = batch.tapped
    if not spec.anchor_predicts:
        raise ModelError("a block drafter whose anchor does not predict cannot be trained yet")
    blocks = choose_anchors(batch.loss_on_host, size, share, batch.seed).to(streams.device)
    ops = BlockOps(blocks, batch.tokens.shape[1], streams.device, streams.dtype)
    pools = [TrainingKV() for _ in module.layers]
    # rope tables are cached by the identity of the positions: these must outlive the pass
    context = torch.arange(batch.tokens.shape[1], device=streams.device)
    module.keep(ops, streams, context, pools)
    before = blocks.gather_rows(batch.tokens)  # for row k: the token that row k - 1 should have drafted
    ids = torch.full_like(before, spec.mask_token_id)
    ids[..., 0] = before[..., 0]
    rows, positions = ids.flatten(1), blocks.positions.flatten(1)
    y, _ = module.draft(ops, ops.embed(embedding, rows), rows, positions, pools)
    return BlockOutputs(blocks, y.view(*ids.shape, -1), module.markov.embed(ops, before) if module.markov else None)


def confidence_loss(module: BlockModule, y: Tensor, before: Tensor | None, shared: Tensor, weight: Tensor) -> Tensor:
    """Binary cross-entropy of the confidence head to the probability of acceptance; only that head learns from it."""
    assert module.confidence
    logits = torch.nn.functional.linear(y.detach(), module.confidence.of_row.weight, module.confidence.of_row.bias)
    if module.confidence.of_token and before is not None:
        logits = logits + torch.nn.functional.linear(before.detach(), module.confidence.of_token.weight)
    return binary_cross_entropy_with_logits(logits[..., 0].float(), shared.float(), weight.float(), reduction="sum")


@dataclass(frozen=True, eq=False)
class DistillationTarget:
    """The trunk's tables for V draft tokens: input embeddings of the head, and logits that it imitates."""

    embedding: Tensor  # [vocabulary, W]
    norm: Tensor  # [W], weight of the trunk's final norm
    ids: Tensor  # [V] ascending target ids of the draft tokens
    lm_head: Tensor  # [V, W] in the head's arithmetic
    exact: Tensor  # [V, W] the trunk's LM head in full precision
    lookup: Tensor  # [vocabulary] target id -> draft index, or -1
    logit_scale: float = 1.0  # of the trunk's logits, as logit_softcap
    logit_softcap: float = 0.0

    @staticmethod
    def of(
        trunk: TorchTrunk, ids: Tensor, *, int4_drafts: bool = False, own_lm_head: Tensor | None = None,
        own_embedding: Tensor | None = None,
    ) -> DistillationTarget:  # fmt: skip
        """For the tokens `ids` [V]. int4_drafts: the head's LM head is rounded as drafts run it. A head's own LM head
        [V, W] and embedding replace the trunk's."""
        lm_head = trunk.lm_head
        lookup = torch.full((len(lm_head),), -1, dtype=torch.int64, device=ids.device)
        lookup[ids] = torch.arange(len(ids), device=ids.device)
        exact, embedding = lm_head[ids].clone(), trunk.model.embedding
        rows = exact if own_lm_head is None else own_lm_head.to(exact)
        rows = (round_int4(rows) if int4_drafts else rows).to(embedding.dtype)
        if own_embedding is not None:
            embedding = own_embedding.to(embedding)
        model = trunk.model
        scaling = model.logit_scale, model.logit_softcap
        return DistillationTarget(embedding, model.norm.weight, ids, rows, exact, lookup, *scaling)


@dataclass(frozen=True)
class LossConfig:
    """Weights and sampling of a batch's loss."""

    steps: tuple[float, ...] = (1.0, 0.8, 0.6)  # weight of each draft step, or row of a block
    terms: LossTerms = field(default_factory=LossTerms)
    candidates: int = 3072  # tokens whose logits a training batch computes; 0: the whole draft vocabulary
    anchors: float = 0.5  # block drafters: share of a text's possible anchors that a batch draws

    @staticmethod
    def of(depth: int) -> LossConfig:
        """For a number of draft steps; steps beyond the third weigh as much as the third."""
        steps = LossConfig.steps
        return LossConfig((steps + steps[-1:] * depth)[:depth], LossTerms(variation=1.0))

    @staticmethod
    def of_block(depth: int) -> LossConfig:
        """For the rows of a block: weights exp(-k / 4), as in DFlash."""
        return LossConfig(tuple(math.exp(-k / 4) for k in range(depth)), LossTerms(variation=1.0))


@dataclass(frozen=True, eq=False)
class BatchResult:
    """A head's result on one batch. Origins O: all positions [B, T], or the anchors of blocks [N, C]."""

    loss: Tensor  # per row of draft step 1
    hits: Tensor  # [*O, depth] bool: the head's argmax is the trunk's
    shared: Tensor  # [*O, depth]: probability of acceptance at T = 1
    valid: Tensor  # [*O, depth] bool: the step counts
    source: Tensor  # [*O] the sequence of each origin


def score_batch(
    modules: Sequence[Any], spec: HeadSpec, target: DistillationTarget, batch: Batch, config: LossConfig
) -> BatchResult:
    """Draft and compare with the trunk. Origin p counts at step i if both t_{p+1} and t_{p+i+1} carry loss: at run time
    a draft starts only after an answer token. Step i's teacher is the trunk at row p + i."""
    if spec.own_lm_head:
        raise ModelError("MTP modules with LM heads of their own cannot be trained yet", "train a new head beside them")
    teacher, row_of = _batch_teacher(target, batch, config)
    if spec.block:
        return _score_blocks(modules[0], target, batch, config, teacher, row_of)
    depth = len(config.steps)
    outputs = unroll(modules, spec, target.embedding, _head_input(spec, target, batch), batch.tokens, depth)
    known = torch.stack([batch.loss_on_host & shift(batch.loss_on_host, i) for i in range(1, depth + 1)], dim=-1)
    valid = known.to(batch.loss.device, non_blocking=True)
    hits, shared = torch.zeros_like(valid), torch.zeros_like(valid, dtype=torch.float32)
    total = batch.final.new_zeros((), dtype=torch.float32)
    for i, (y, weight) in enumerate(zip(outputs, config.steps, strict=True)):
        where = true_positions(known[..., i], y.device)
        rows = shift(row_of, i + 1).flatten()[where]
        scale = torch.full((len(rows),), weight, dtype=target.exact.dtype, device=y.device)
        loss, step_hits, step_shared = distill(y.flatten(0, 1)[where], teacher, rows, scale, config.terms)
        hits.view(-1, depth)[where, i], shared.view(-1, depth)[where, i] = step_hits, step_shared.float()
        total = total + loss
    source = torch.arange(len(batch.tokens), device=valid.device)[:, None].expand_as(batch.tokens)
    return BatchResult(total / max(int(known[..., 0].sum()), 1), hits, shared, valid, source)


def _score_blocks(
    module: BlockModule, target: DistillationTarget, batch: Batch, config: LossConfig, teacher: Teacher, row_of: Tensor
) -> BatchResult:
    drafts = draft_blocks(module, target.embedding, batch, len(config.steps), config.anchors)
    blocks, valid, rows = drafts.blocks, drafts.blocks.valid, drafts.blocks.rows
    scale = torch.tensor(config.steps, dtype=target.exact.dtype, device=valid.device)[rows % valid.shape[-1]]
    y, before = (None if x is None else x.flatten(0, 2)[rows] for x in (drafts.y, drafts.before))
    assert y is not None
    if module.spec.logit_scale != 1:
        y = y * module.spec.logit_scale
    markov = None if before is None or module.markov is None else (before, module.markov.out.weight)
    teacher_rows = blocks.gather_rows(row_of).flatten()[rows]
    loss, row_hits, row_shared = distill(y, teacher, teacher_rows, scale, config.terms, markov)
    if module.confidence:
        loss = loss + confidence_loss(module, y, before, row_shared, scale)
    hits = torch.zeros(valid.shape, dtype=torch.bool, device=valid.device)
    shared = torch.zeros(valid.shape, device=valid.device)
    hits.view(-1)[rows], shared.view(-1)[rows] = row_hits, row_shared.float()
    source = blocks.source[:, None].expand(valid.shape[:-1])
    return BatchResult(loss / scale.sum().clamp(min=1), hits, shared, valid, source)


def _head_input(spec: HeadSpec, target: DistillationTarget, batch: Batch) -> Tensor:
    """Hidden states that the head reads, [B, T, W or taps x W]."""
    if tapped_layers(spec.tap) or spec.tap == "streams":
        return batch.tapped
    return batch.final if spec.tap == "post_norm" else before_norm(batch.final, target.norm)


def before_norm(final: Tensor, weight: Tensor) -> Tensor:
    """Input of an RMSNorm of `weight` [W] from its output, up to a positive factor per row, which the head's own norm
    removes again. Zero where the weight is zero."""
    return torch.where(weight == 0, 0, final / weight).to(final.dtype)


def _batch_teacher(target: DistillationTarget, batch: Batch, config: LossConfig) -> tuple[Teacher, Tensor]:
    """The trunk at all rows that carry loss, and the index [B, T] of each row in it."""
    where = true_positions(batch.loss_on_host, batch.loss.device)
    best, final = batch.best.flatten()[where], batch.final.flatten(0, 1)[where]
    labels = torch.where(best >= 0, target.lookup[best.clamp(min=0)], -1)
    row_of = (batch.loss.flatten().cumsum(0) - 1).view_as(batch.loss)
    candidates = all_candidates(target.lm_head)
    if config.candidates and torch.is_grad_enabled():
        generator = torch.Generator().manual_seed(batch.seed)
        exact = target.exact.to(target.lm_head.dtype)
        candidates = likely_candidates(final, labels, exact, config.candidates, generator)
        candidates = replace(candidates, lm_head=target.lm_head[candidates.ids])  # the head may have rows of its own
    scaling = target.logit_scale, target.logit_softcap
    return make_teacher(final, target.exact, labels, candidates, *scaling), row_of


def unroll(
    modules: Sequence[Module], spec: HeadSpec, embedding: Tensor, hidden: Tensor, tokens: Tensor, depth: int
) -> list[Tensor]:
    """Run the head for `depth` draft steps from every origin at once, teacher-forced on the text.

    Head inputs [B, T, W or taps x W] and tokens [B, T] -> y of draft steps 1..depth, each [B, T, W]. Row p of step i
    reads token p + i. Past the end of the text it reads token 0, and the row has no meaning.
    """
    ops, filled = TrainOps(hidden.device, hidden.dtype), {0}
    memories = [join_pools([TrainingKV() for _ in module.kv_specs]) for module in modules]
    origins = torch.arange(FIRST_PAIR_POSITION, FIRST_PAIR_POSITION + tokens.shape[1], device=tokens.device)
    pairs = StepInputs(shift(tokens, 1), origins, None, hidden)
    kept = [pairs]  # TrainOps keeps rope tables by the identity of the positions: they must outlive the loop
    output, recycled = modules[0].forward(ops, spec, ops.embed(embedding, pairs.token_ids), pairs, memories[0])
    outputs = [output]
    for i in range(1, depth):
        number = cast(int, spec.module_of(i))
        module, memory = modules[number], memories[number]
        if module.kv_specs and number not in filled:
            filled.add(number)
            module.forward(ops, spec, ops.embed(embedding, pairs.token_ids), pairs, memory)
        ids = shift(tokens, i + 1)
        kept.append(StepInputs(ids, origins + 1 + spec.rows_before(i), None, recycled))
        output, recycled = module.forward(ops, spec, ops.embed(embedding, ids), kept[-1], memory, recycled=True)
        outputs.append(output)
    return outputs


def shift(x: Tensor, by: int) -> Tensor:
    """x [B, T] moved left: result[:, p] = x[:, p + by], zero past the end."""
    return torch.nn.functional.pad(x[:, by:], (0, min(by, x.shape[1])))


def count_accepted(result: BatchResult, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per sequence: accepted [B, depth] (steps 1..i all hit), expected [B, depth] (the same at T = 1) and tried [B]
    (origins with all steps valid)."""
    whole = result.valid.all(-1)
    source = result.source[whole]

    def summed(x: Tensor) -> Tensor:
        return x.new_zeros(num_sequences, *x.shape[1:]).index_add_(0, source, x)

    hits, shared = result.hits[whole].long().cumprod(-1), result.shared[whole].cumprod(-1)
    return summed(hits), summed(shared), summed(torch.ones_like(source))
