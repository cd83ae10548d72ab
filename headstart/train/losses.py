"""The distillation loss with its gradient, without ever keeping [N, V] activations.

Shapes: N rows that carry loss, W width, V draft vocabulary, M candidates: those of its tokens that a batch is scored
on, r rank of a Markov head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK, GPU_CHUNK = 512, 8192
"""Rows whose logits exist at the same time: small enough for the shared cache of a CPU, and enough to fill a GPU."""


def chunk_of(x: Tensor) -> int:
    """Rows whose logits exist at the same time, where x is."""
    return CHUNK if x.device.type == "cpu" else GPU_CHUNK


@dataclass(frozen=True, eq=False)
class Candidates:
    """The tokens whose logits a batch computes. `ids` [M] ascending draft ids; `lm_head` [M, W] as the head sees it;
    `prior` [M] is added to logits of trunk and head: a random token stands for as many as it was drawn from."""

    ids: Tensor
    lm_head: Tensor
    prior: Tensor


@dataclass(frozen=True, eq=False)
class Teacher:
    """What the trunk says at N rows: `probs` [N, M] over candidates, `best` [N] the index of its argmax among them, -1
    where it is not one."""

    probs: Tensor
    best: Tensor
    candidates: Candidates


@dataclass(frozen=True)
class Terms:
    """Of a row's loss, beside the cross-entropy to the trunk's distribution p: `top1` times that to its argmax, and
    `variation` times 1 - sum min(p, q), the chance that a draft is rejected at T = 1."""

    top1: float = 0.5
    variation: float = 0.0


def everything(lm_head: Tensor) -> Candidates:
    """The whole draft vocabulary."""
    return Candidates(torch.arange(len(lm_head), device=lm_head.device), lm_head, lm_head.new_zeros(len(lm_head)))


@torch.no_grad()
def likely(hidden: Tensor, best: Tensor, lm_head: Tensor, size: int, generator: torch.Generator) -> Candidates:
    """`size` of the draft vocabulary: every argmax `best` [N], the tokens that the trunk (states [N, W]) gives most to
    over all rows, and for the last third random others, each for its share of what is left out."""
    if size >= len(lm_head):
        return everything(lm_head)
    mass = torch.zeros(len(lm_head), device=lm_head.device)
    for rows in hidden.to(lm_head.dtype).split(chunk_of(hidden)):
        mass += (rows @ lm_head.T).softmax(-1).sum(0, dtype=torch.float32)
    mass[best[best >= 0]] += len(hidden)
    mass = mass.cpu()
    order = mass.argsort(descending=True)
    num_first = max(size - size // 3, int((mass >= len(hidden)).sum()))
    rest = order[num_first:]
    drawn = rest[torch.randperm(len(rest), generator=generator)[: size // 3]]
    prior = torch.zeros(len(lm_head))
    prior[drawn] = math.log(len(rest) / len(drawn))
    ids = torch.cat((order[:num_first], drawn)).sort().values
    where = ids.to(lm_head.device)
    return Candidates(where, lm_head[where], prior[ids].to(lm_head.device))


@torch.no_grad()
def teach(hidden: Tensor, lm_head: Tensor, best: Tensor, candidates: Candidates | None = None) -> Teacher:
    """Trunk hidden states [N, W], LM head [V, W] and argmax draft ids [N] (or -1) -> teacher, over all tokens or some.
    Logits in float32: bfloat16 ones step by 0.125 at 20."""
    candidates = candidates or everything(lm_head)
    if len(candidates.ids) < len(lm_head):
        place = torch.full((len(lm_head),), -1, dtype=torch.int64, device=lm_head.device)
        place[candidates.ids] = torch.arange(len(candidates.ids), device=lm_head.device)
        lm_head, best = lm_head[candidates.ids], torch.where(best >= 0, place[best.clamp(min=0)], -1)
    kept = torch.bfloat16 if lm_head.dtype != torch.float64 else torch.float32
    probs = torch.empty(len(hidden), len(lm_head), dtype=kept, device=hidden.device)
    prior = candidates.prior.to(lm_head.dtype)
    chunk = chunk_of(hidden)
    for start in range(0, len(hidden), chunk):
        logits = hidden[start : start + chunk].to(lm_head.dtype) @ lm_head.T + prior
        probs[start : start + chunk] = logits.softmax(-1).to(kept)
    return Teacher(probs, best, candidates)


class _Distill(torch.autograd.Function):
    """sum over rows of weight * loss; see `distill`."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        before: Tensor,
        out: Tensor,
        teacher: Teacher,
        rows: Tensor,
        weight: Tensor,
        terms: Terms,
    ) -> tuple[Tensor, Tensor, Tensor]:
        lm_head, prior = teacher.candidates.lm_head, teacher.candidates.prior.to(weight.dtype)
        learns = ctx.needs_input_grad[0]
        grad, grad_before = torch.empty_like(y), torch.empty_like(before)
        grad_out = torch.zeros_like(out, dtype=weight.dtype)
        total = torch.zeros((), dtype=torch.float64, device=y.device)
        hits = torch.zeros(len(y), dtype=torch.bool, device=y.device)
        shared = torch.zeros(len(y), dtype=weight.dtype, device=y.device)
        chunk = chunk_of(y)
        for start in range(0, len(y), chunk):
            part = slice(start, min(start + chunk, len(y)))
            target = teacher.probs[rows[part]].to(weight.dtype)
            label = teacher.best[rows[part]]
            logits = y[part] @ lm_head.T
            if out.shape[1]:
                logits += before[part] @ out.T
            log_probs = (logits.to(weight.dtype) + prior).log_softmax(-1)
            if not learns:
                hits[part] = log_probs.argmax(-1) == label
                shared[part] = torch.minimum(log_probs.exp_(), target).sum(-1)
                continue
            loss, shared[part], slope = _chunk(log_probs, target, label, weight[part], terms)
            total += loss
            slope = slope.to(y.dtype)
            grad[part] = slope @ lm_head
            if out.shape[1]:
                grad_before[part] = slope @ out
                grad_out += slope.T @ before[part]
        ctx.save_for_backward(grad, grad_before, grad_out.to(out.dtype))
        ctx.mark_non_differentiable(hits, shared)
        return total.to(weight.dtype), hits, shared

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [grad * grads[0].to(grad.dtype) for grad in ctx.saved_tensors]
        return *scaled, None, None, None, None


def _chunk(
    log_probs: Tensor, target: Tensor, label: Tensor, weight: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [n, M] -> (summed loss, sum min(p, q) [n], d loss / d logits [n, M])."""
    hard = terms.top1 * (label >= 0).to(weight.dtype)
    picked = label.clamp(min=0)[:, None]
    loss = -(target * log_probs).sum(-1) - hard * log_probs.gather(-1, picked)[:, 0]
    probs = log_probs.exp_()
    shared = torch.minimum(probs, target).sum(-1)
    slope = probs * (1 + hard)[:, None] - target
    slope.scatter_add_(-1, picked, -hard[:, None])
    if terms.variation:
        loss = loss + terms.variation * (1 - shared)
        rising = probs * (probs < target)  # where more of q would be accepted
        probs.mul_(rising.sum(-1, keepdim=True)).sub_(rising)
        slope.add_(probs, alpha=terms.variation)
    return (loss * weight).sum().double(), shared, slope.mul_(weight[:, None])


def distill(
    y: Tensor,
    teacher: Teacher,
    rows: Tensor,
    weight: Tensor,
    terms: Terms,
    markov: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Head outputs y [N, W] against `teacher` at `rows` [N] -> (sum of weight * loss, hits [N]: the argmax is the
    teacher's, shared [N]: sum min(p, q), the chance that a draft is accepted at T = 1). The loss is computed where
    gradients are recorded, the hits where they are not. `markov`: embeddings of the tokens before [N, r], and the
    matrix [V, r] that makes logits of them."""
    before, out = markov if markov else (y.new_zeros(len(y), 0), y.new_zeros(len(teacher.candidates.ids), 0))
    if markov and len(out) > len(teacher.candidates.ids):
        out = out[teacher.candidates.ids]
    loss, hits, shared = _Distill.apply(  # type: ignore[no-untyped-call]
        y, before, out, teacher, rows, weight, terms
    )
    return loss, hits, shared
