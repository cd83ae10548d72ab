"""The distillation loss with its gradient, computed in chunks without storing [N, V] activations.

Shapes: N rows that carry loss, W width, V draft vocabulary, M candidate tokens of a batch, r rank of a Markov head.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK, GPU_CHUNK = 512, 8192
"""Rows whose logits exist at the same time: they fit into a CPU's shared cache, and fill a GPU."""


def chunk_rows(x: Tensor) -> int:
    """Rows whose logits exist at the same time, on the device of x."""
    return CHUNK if x.device.type == "cpu" else GPU_CHUNK


@dataclass(frozen=True, eq=False)
class CandidateTokens:
    """The tokens whose logits a batch computes."""

    ids: Tensor  # [M] ascending draft ids
    lm_head: Tensor  # [M, W] in the head's arithmetic
    prior: Tensor  # [M] added to the logits of trunk and head: log of the number of tokens that a random one represents


@dataclass(frozen=True, eq=False)
class Teacher:
    """The trunk's distribution at N rows."""

    probs: Tensor  # [N, M] over the candidates
    best: Tensor  # [N] index of the trunk's argmax among the candidates, -1 if it is none of them
    candidates: CandidateTokens


@dataclass(frozen=True)
class LossTerms:
    """Weights of a row's loss terms, beside the cross-entropy to the trunk's distribution p."""

    top1: float = 0.5  # cross-entropy to the trunk's argmax
    variation: float = 0.0  # 1 - sum min(p, q), the probability that a draft is rejected at T = 1


def all_candidates(lm_head: Tensor) -> CandidateTokens:
    """The whole draft vocabulary."""
    return CandidateTokens(torch.arange(len(lm_head), device=lm_head.device), lm_head, lm_head.new_zeros(len(lm_head)))


@torch.no_grad()
def likely_candidates(
    hidden: Tensor, best: Tensor, lm_head: Tensor, size: int, generator: torch.Generator
) -> CandidateTokens:
    """`size` tokens of the draft vocabulary: every argmax `best` [N], the tokens with the highest probability over all
    rows (trunk states [N, W]), and one third random others that represent the rest."""
    if size >= len(lm_head):
        return all_candidates(lm_head)
    mass = torch.zeros(len(lm_head), device=lm_head.device)
    for rows in hidden.to(lm_head.dtype).split(chunk_rows(hidden)):
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
    return CandidateTokens(where, lm_head[where], prior[ids].to(lm_head.device))


@torch.no_grad()
def make_teacher(
    hidden: Tensor, lm_head: Tensor, best: Tensor, candidates: CandidateTokens | None = None, scale: float = 1.0,
    softcap: float = 0.0,
) -> Teacher:  # fmt: skip
    """Trunk hidden states [N, W], LM head [V, W] and argmax draft ids [N] (or -1) -> teacher over all or some tokens.
    Logits are float32: in bfloat16 they step by 0.125 at 20. `scale`, `softcap`: of the trunk's logits."""
    candidates = candidates or all_candidates(lm_head)
    if len(candidates.ids) < len(lm_head):
        place = torch.full((len(lm_head),), -1, dtype=torch.int64, device=lm_head.device)
        place[candidates.ids] = torch.arange(len(candidates.ids), device=lm_head.device)
        lm_head, best = lm_head[candidates.ids], torch.where(best >= 0, place[best.clamp(min=0)], -1)
    kept = torch.bfloat16 if lm_head.dtype != torch.float64 else torch.float32
    probs = torch.empty(len(hidden), len(lm_head), dtype=kept, device=hidden.device)
    prior = candidates.prior.to(lm_head.dtype)
    chunk = chunk_rows(hidden)
    for start in range(0, len(hidden), chunk):
        logits = hidden[start : start + chunk].to(lm_head.dtype) @ lm_head.T
        if scale != 1:
            logits *= scale
        if softcap:
            logits = softcap * (logits / softcap).tanh()
        probs[start : start + chunk] = (logits + prior).softmax(-1).to(kept)
    return Teacher(probs, best, candidates)


class _Distill(torch.autograd.Function):
    """sum over rows of weight * loss; see `distill`."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, before: Tensor, out: Tensor, teacher: Teacher, rows: Tensor, weight: Tensor,
        terms: LossTerms,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        lm_head, prior = teacher.candidates.lm_head, teacher.candidates.prior.to(weight.dtype)
        learns = ctx.needs_input_grad[0]
        grad, grad_before = torch.empty_like(y), torch.empty_like(before)
        grad_out = torch.zeros_like(out, dtype=weight.dtype)
        total = torch.zeros((), dtype=torch.float64, device=y.device)
        hits = torch.zeros(len(y), dtype=torch.bool, device=y.device)
        shared = torch.zeros(len(y), dtype=weight.dtype, device=y.device)
        chunk = chunk_rows(y)
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
    log_probs: Tensor, target: Tensor, label: Tensor, weight: Tensor, terms: LossTerms
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
        rising = probs * (probs < target)  # where a larger q would raise acceptance
        probs.mul_(rising.sum(-1, keepdim=True)).sub_(rising)
        slope.add_(probs, alpha=terms.variation)
    return (loss * weight).sum().double(), shared, slope.mul_(weight[:, None])


def distill(
    y: Tensor, teacher: Teacher, rows: Tensor, weight: Tensor, terms: LossTerms,
    markov: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Head outputs y [N, W] against `teacher` at `rows` [N] -> (sum of weight * loss, hits [N]: the argmax is the
    teacher's, shared [N]: sum min(p, q), the probability of acceptance at T = 1). The loss is computed only where
    gradients are recorded, the hits only where they are not. `markov`: embeddings of the previous tokens [N, r], and
    the matrix [V, r] from them to logits."""
    before, out = markov if markov else (y.new_zeros(len(y), 0), y.new_zeros(len(teacher.candidates.ids), 0))
    if markov and len(out) > len(teacher.candidates.ids):
        out = out[teacher.candidates.ids]
    loss, hits, shared = _Distill.apply(  # type: ignore[no-untyped-call]
        y, before, out, teacher, rows, weight, terms
    )
    return loss, hits, shared
