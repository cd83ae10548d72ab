"""One batch through the unrolled head: loss for training, hits for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart.heads.base import HeadSpec, Module
from headstart.layers.decoder import tapped_layers
from headstart.train.batches import Batch
from headstart.train.features import Trunk
from headstart.train.head import before_norm
from headstart.train.losses import Teacher, distill, teach
from headstart.train.rounding import int4
from headstart.train.unroll import shift, unroll


@dataclass(frozen=True, eq=False)
class Target:
    """What the head imitates. V draft tokens: `ids` [V] ascending target ids, `lm_head` [V, W] in the head's
    arithmetic and `exact` [V, W] in full precision; `lookup` [vocabulary] target id -> draft index or -1. Of the trunk
    itself: `embedding` [vocabulary, W], and `norm` [W], the weight of the final norm."""

    embedding: Tensor
    norm: Tensor
    ids: Tensor
    lm_head: Tensor
    exact: Tensor
    lookup: Tensor

    @staticmethod
    def of(trunk: Trunk, ids: Tensor, *, rounded: bool = False) -> Target:
        """For the tokens `ids` [V]. rounded: the head sees the rows of the LM head as drafts run with them, in int4."""
        lm_head = trunk.lm_head
        lookup = torch.full((len(lm_head),), -1, dtype=torch.int64, device=ids.device)
        lookup[ids] = torch.arange(len(ids), device=ids.device)
        exact, embedding = lm_head[ids].clone(), trunk.model.embedding
        seen = (int4(exact) if rounded else exact).to(embedding.dtype)
        return Target(embedding, trunk.model.norm.weight, ids, seen, exact, lookup)


@dataclass(frozen=True)
class Weighting:
    """Of draft steps against each other, and of the top-1 term against the soft one."""

    steps: tuple[float, ...] = (1.0, 0.8, 0.6)
    top1: float = 0.5

    @staticmethod
    def of(depth: int) -> Weighting:
        """For so many draft steps; those beyond the third count like it."""
        steps = Weighting.steps
        return Weighting((steps + steps[-1:] * depth)[:depth])


@dataclass(frozen=True, eq=False)
class Outcome:
    """`loss` per row of step 1; `hits` [B, T, depth]: the head's argmax is the trunk's; `valid` [B, T, depth]."""

    loss: Tensor
    hits: Tensor
    valid: Tensor


def assess(modules: Sequence[Module], spec: HeadSpec, target: Target, batch: Batch, weighting: Weighting) -> Outcome:
    """Unroll and compare. Origin p counts at step i if both t_{p+1} and t_{p+i+1} are tokens that carry loss: at run
    time a draft starts only after an answer token. Step i's teacher is the trunk at row p + i."""
    depth = len(weighting.steps)
    outputs = unroll(modules, spec, target.embedding, _read(spec, target, batch), batch.tokens, depth)
    valid = torch.stack([batch.loss & shift(batch.loss, i) for i in range(1, depth + 1)], dim=-1)
    teacher, row_of = _teacher(target, batch)
    hits = torch.zeros_like(valid)
    total = batch.final.new_zeros((), dtype=torch.float32)
    for i, (y, weight) in enumerate(zip(outputs, weighting.steps, strict=True)):
        where = valid[..., i]
        rows = shift(row_of, i + 1)[where]
        scale = torch.full((len(rows),), weight, dtype=target.exact.dtype, device=y.device)
        loss, correct = distill(y[where], target.lm_head, teacher, rows, scale, weighting.top1)
        hits[..., i][where] = correct
        total = total + loss
    return Outcome(total / valid[..., 0].sum().clamp(min=1), hits, valid)


def _read(spec: HeadSpec, target: Target, batch: Batch) -> Tensor:
    """What the head reads of the trunk, [B, T, W or taps x W]."""
    if tapped_layers(spec.tap):
        return batch.tapped
    return batch.final if spec.tap == "post_norm" else before_norm(batch.final, target.norm)


def _teacher(target: Target, batch: Batch) -> tuple[Teacher, Tensor]:
    """The trunk at all rows that carry loss, and [B, T] the place of each row in it."""
    best = batch.best[batch.loss]
    labels = torch.where(best >= 0, target.lookup[best.clamp(min=0)], -1)
    row_of = (batch.loss.flatten().cumsum(0) - 1).view_as(batch.loss)
    return teach(batch.final[batch.loss], target.exact, labels), row_of


def cumulative(outcome: Outcome) -> tuple[Tensor, Tensor]:
    """Per sequence: accepted [B, depth] (steps 1..i all hit) and tried [B, depth] (origins with all steps valid)."""
    tried = outcome.valid.all(-1)
    accepted = outcome.hits.cumprod(-1).bool() & tried[..., None]
    return accepted.sum(1), tried.sum(1)[:, None].expand(-1, outcome.hits.shape[-1])
