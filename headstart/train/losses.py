"""The distillation loss with its gradient, without ever keeping [N, V] activations.

Shapes: N rows that carry loss, W width, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK = 512
"""Rows whose logits exist at the same time: small enough for the shared cache of a CPU."""


@dataclass(frozen=True, eq=False)
class Teacher:
    """What the trunk says at N rows: `probs` [N, V] over the draft vocabulary, `best` [N] the index of its argmax in
    the draft vocabulary, -1 where the argmax is not in it."""

    probs: Tensor
    best: Tensor


@torch.no_grad()
def teach(hidden: Tensor, lm_head: Tensor, best: Tensor) -> Teacher:
    """Trunk hidden states [N, W] -> teacher. Logits in float32: bfloat16 ones step by 0.125 at 20."""
    probs = torch.empty(len(hidden), len(lm_head), dtype=torch.bfloat16 if lm_head.dtype != torch.float64 else None)
    for rows in torch.arange(len(hidden)).split(CHUNK):
        probs[rows[0] : rows[-1] + 1] = (hidden[rows].to(lm_head.dtype) @ lm_head.T).softmax(-1).to(probs.dtype)
    return Teacher(probs.to(hidden.device), best)


class _Distill(torch.autograd.Function):
    """sum over rows of weight * (cross-entropy to probs + top1 * cross-entropy to best); see `distill`."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, lm_head: Tensor, probs: Tensor, best: Tensor, rows: Tensor, weight: Tensor, top1: float
    ) -> tuple[Tensor, Tensor]:
        grad = torch.empty_like(y)
        total = torch.zeros((), dtype=torch.float64, device=y.device)
        hits = torch.zeros(len(y), dtype=torch.bool, device=y.device)
        for start in range(0, len(y), CHUNK):
            part = slice(start, min(start + CHUNK, len(y)))
            target = probs[rows[part]].to(weight.dtype)
            label = best[rows[part]]
            known = label >= 0
            logits = y[part] @ lm_head.T
            if not ctx.needs_input_grad[0]:  # evaluation
                hits[part] = logits.float().argmax(-1) == label
                continue
            loss, slope = _chunk(logits, target, label, known, weight[part], top1)
            total += loss
            grad[part] = slope.to(y.dtype) @ lm_head
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(hits)
        return total.to(weight.dtype), hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0].to(grad.dtype), None, None, None, None, None, None


def _chunk(
    logits: Tensor, target: Tensor, label: Tensor, known: Tensor, weight: Tensor, top1: float
) -> tuple[Tensor, Tensor]:
    """Logits [n, V] -> (summed loss, d loss / d logits [n, V])."""
    log_probs = logits.to(weight.dtype).log_softmax(-1)
    hard = top1 * known.to(weight.dtype)
    picked = label.clamp(min=0)[:, None]
    loss = -(target * log_probs).sum(-1) - hard * log_probs.gather(-1, picked)[:, 0]
    slope = log_probs.exp_().mul_((1 + hard)[:, None]).sub_(target)
    slope.scatter_add_(-1, picked, -hard[:, None])
    return (loss * weight).sum().double(), slope.mul_(weight[:, None])


def distill(
    y: Tensor, lm_head: Tensor, teacher: Teacher, rows: Tensor, weight: Tensor, top1: float
) -> tuple[Tensor, Tensor]:
    """Head outputs y [N, W] against `teacher` at `rows` [N] -> (sum of weight * loss, hits [N]). Only what is needed is
    computed: the loss where gradients are recorded, the hits (argmax is the teacher's best) where they are not."""
    loss, hits = _Distill.apply(  # type: ignore[no-untyped-call]
        y, lm_head, teacher.probs, teacher.best, rows, weight, top1
    )
    return loss, hits
