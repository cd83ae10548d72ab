"""One batch through the head, unrolled or in blocks: loss for training, hits for evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from headstart.errors import ModelError
from headstart.heads.base import HeadSpec
from headstart.heads.block import BlockModule
from headstart.layers.decoder import tapped_layers
from headstart.train.batches import Batch, places
from headstart.train.blocks import confidence_loss, draft
from headstart.train.features import Trunk
from headstart.train.head import before_norm
from headstart.train.losses import Teacher, Terms, distill, everything, likely, teach
from headstart.train.rounding import int4
from headstart.train.unroll import shift, unroll


@dataclass(frozen=True, eq=False)
class Target:
    """What the head imitates. V draft tokens: `ids` [V] ascending target ids, `lm_head` [V, W] in the head's
    arithmetic and `exact` [V, W] the trunk's in full precision; `lookup` [vocabulary] target id -> draft index or -1;
    `embedding` [vocabulary, W]. Of the trunk itself: `norm` [W], the weight of the final norm."""

    embedding: Tensor
    norm: Tensor
    ids: Tensor
    lm_head: Tensor
    exact: Tensor
    lookup: Tensor

    @staticmethod
    def of(
        trunk: Trunk,
        ids: Tensor,
        *,
        rounded: bool = False,
        own_lm_head: Tensor | None = None,
        own_embedding: Tensor | None = None,
    ) -> Target:
        """For the tokens `ids` [V]. rounded: the head sees the rows of the LM head as drafts run with them, in int4.
        A head's own LM head [V, W] and embedding stand in place of the trunk's."""
        lm_head = trunk.lm_head
        lookup = torch.full((len(lm_head),), -1, dtype=torch.int64, device=ids.device)
        lookup[ids] = torch.arange(len(ids), device=ids.device)
        exact, embedding = lm_head[ids].clone(), trunk.model.embedding
        rows = exact if own_lm_head is None else own_lm_head.to(exact)
        seen = (int4(rows) if rounded else rows).to(embedding.dtype)
        if own_embedding is not None:
            embedding = own_embedding.to(embedding)
        return Target(embedding, trunk.model.norm.weight, ids, seen, exact, lookup)


@dataclass(frozen=True)
class Weighting:
    """Of draft steps (rows of a block) against each other, and of the terms of their loss. `candidates`: tokens whose
    logits a training batch computes, 0: the whole draft vocabulary. `anchors`: share of the possible anchors of a text
    that a batch draws."""

    steps: tuple[float, ...] = (1.0, 0.8, 0.6)
    terms: Terms = field(default_factory=Terms)
    candidates: int = 0
    anchors: float = 0.5

    @staticmethod
    def of(depth: int) -> Weighting:
        """For so many draft steps; those beyond the third count like it."""
        steps = Weighting.steps
        return Weighting((steps + steps[-1:] * depth)[:depth])

    @staticmethod
    def of_block(depth: int) -> Weighting:
        """For the rows of a block: exp(-k / 4) as in DFlash."""
        return Weighting(tuple(math.exp(-k / 4) for k in range(depth)), Terms(variation=1.0), candidates=3072)


@dataclass(frozen=True, eq=False)
class Outcome:
    """`loss` per row of step 1. Of origins O (all positions [B, T], or the anchors of blocks [N, C]): `hits`
    [*O, depth]: the head's argmax is the trunk's; `shared` [*O, depth]: the chance of acceptance at T = 1; `valid`
    [*O, depth]; `source` [*O]: the sequence of each."""

    loss: Tensor
    hits: Tensor
    shared: Tensor
    valid: Tensor
    source: Tensor


def assess(modules: Sequence[Any], spec: HeadSpec, target: Target, batch: Batch, weighting: Weighting) -> Outcome:
    """Draft and compare. Origin p counts at step i if both t_{p+1} and t_{p+i+1} are tokens that carry loss: at run
    time a draft starts only after an answer token. Step i's teacher is the trunk at row p + i."""
    if spec.own_lm_head:
        raise ModelError("MTP modules with LM heads of their own cannot be trained yet", "train a new head beside them")
    teacher, row_of = _teacher(target, batch, weighting)
    if spec.block:
        return _assess_blocks(modules[0], target, batch, weighting, teacher, row_of)
    depth = len(weighting.steps)
    outputs = unroll(modules, spec, target.embedding, _read(spec, target, batch), batch.tokens, depth)
    known = torch.stack([batch.on_host & shift(batch.on_host, i) for i in range(1, depth + 1)], dim=-1)
    valid = known.to(batch.loss.device, non_blocking=True)
    hits, shared = torch.zeros_like(valid), torch.zeros_like(valid, dtype=torch.float32)
    total = batch.final.new_zeros((), dtype=torch.float32)
    for i, (y, weight) in enumerate(zip(outputs, weighting.steps, strict=True)):
        where = places(known[..., i], y.device)
        rows = shift(row_of, i + 1).flatten()[where]
        scale = torch.full((len(rows),), weight, dtype=target.exact.dtype, device=y.device)
        loss, right, chances = distill(y.flatten(0, 1)[where], teacher, rows, scale, weighting.terms)
        hits.view(-1, depth)[where, i], shared.view(-1, depth)[where, i] = right, chances.float()
        total = total + loss
    source = torch.arange(len(batch.tokens), device=valid.device)[:, None].expand_as(batch.tokens)
    return Outcome(total / max(int(known[..., 0].sum()), 1), hits, shared, valid, source)


def _assess_blocks(
    module: BlockModule, target: Target, batch: Batch, weighting: Weighting, teacher: Teacher, row_of: Tensor
) -> Outcome:
    drafted = draft(module, target.embedding, batch, len(weighting.steps), weighting.anchors)
    blocks, where = drafted.blocks, drafted.blocks.valid
    rows = blocks.rows
    scale = torch.tensor(weighting.steps, dtype=target.exact.dtype, device=where.device)[rows % where.shape[-1]]
    y, before = (None if x is None else x.flatten(0, 2)[rows] for x in (drafted.y, drafted.before))
    assert y is not None
    if module.spec.logit_scale != 1:
        y = y * module.spec.logit_scale
    markov = None if before is None or module.markov is None else (before, module.markov.out.weight)
    loss, right, chances = distill(y, teacher, blocks.at_rows(row_of).flatten()[rows], scale, weighting.terms, markov)
    if module.confidence:
        loss = loss + confidence_loss(module, y, before, chances, scale)
    hits = torch.zeros(where.shape, dtype=torch.bool, device=where.device)
    shared = torch.zeros(where.shape, device=where.device)
    hits.view(-1)[rows], shared.view(-1)[rows] = right, chances.float()
    source = blocks.source[:, None].expand(where.shape[:-1])
    return Outcome(loss / scale.sum().clamp(min=1), hits, shared, where, source)


def _read(spec: HeadSpec, target: Target, batch: Batch) -> Tensor:
    """What the head reads of the trunk, [B, T, W or taps x W]."""
    if tapped_layers(spec.tap) or spec.tap == "streams":
        return batch.tapped
    return batch.final if spec.tap == "post_norm" else before_norm(batch.final, target.norm)


def _teacher(target: Target, batch: Batch, weighting: Weighting) -> tuple[Teacher, Tensor]:
    """The trunk at all rows that carry loss, and [B, T] the place of each row in it."""
    where = places(batch.on_host, batch.loss.device)
    best, final = batch.best.flatten()[where], batch.final.flatten(0, 1)[where]
    labels = torch.where(best >= 0, target.lookup[best.clamp(min=0)], -1)
    row_of = (batch.loss.flatten().cumsum(0) - 1).view_as(batch.loss)
    candidates = everything(target.lm_head)
    if weighting.candidates and torch.is_grad_enabled():
        generator = torch.Generator().manual_seed(batch.seed)
        told = likely(final, labels, target.exact.to(target.lm_head.dtype), weighting.candidates, generator)
        candidates = replace(told, lm_head=target.lm_head[told.ids])  # its own rows, where it has them
    return teach(final, target.exact, labels, candidates), row_of


def cumulative(outcome: Outcome, num_sequences: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per sequence: accepted [B, depth] (steps 1..i all hit), expected [B, depth] (the same at T = 1) and tried [B]
    (origins with all steps valid)."""
    whole = outcome.valid.all(-1)
    source = outcome.source[whole]

    def summed(x: Tensor) -> Tensor:
        return x.new_zeros(num_sequences, *x.shape[1:]).index_add_(0, source, x)

    hits, shared = outcome.hits[whole].long().cumprod(-1), outcome.shared[whole].cumprod(-1)
    return summed(hits), summed(shared), summed(torch.ones_like(source))
