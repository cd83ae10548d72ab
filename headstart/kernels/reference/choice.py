"""What an indexer chooses (Ops.choose): scores of positions, and the best of them. R rows, L positions."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.kernels.indexing import IndexSpec


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, spec: IndexSpec) -> Tensor:
    """q [..., R, heads * D], weights [..., R, heads], keys [..., L, D] -> [..., R, L], at least in float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    heads = q.to(wide).unflatten(-1, (spec.num_heads, spec.head_dim)).flatten(-3, -2)
    products = (heads @ keys.to(wide).transpose(-1, -2)).relu()
    by_head = products.unflatten(-2, (-1, spec.num_heads))  # [..., R, heads, L]
    scores: Tensor = (weights.to(wide)[..., None, :] @ by_head).squeeze(-2)
    return scores


def best_positions(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """scores and what rows see [..., L] -> which positions they take [..., L]: of equal scores the first, NaN last."""
    least = torch.finfo(scores.dtype).min
    kept = torch.where(scores.isnan(), least, scores).clamp(min=least).masked_fill(~visible, float("-inf"))
    order = kept.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return torch.zeros_like(visible).scatter_(-1, order, True) & visible
