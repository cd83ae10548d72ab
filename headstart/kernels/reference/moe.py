"""Mixtures of experts in plain torch: the choice of experts, and the sum over those that some row takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu, silu, softplus

from headstart.kernels.ops import Activation, Experts, RouterSpec

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "relu": relu,
    "relu2": lambda x: relu(x).square(),
    "identity": lambda x: x,
}
LIMIT, SLOPE = 7.0, 1.702
"""Of the clamped SwiGLU: the largest factor, and how steep the sigmoid is."""
LIMITED: Mapping[Activation, float] = {"silu_7": 7.0, "silu_16": 16.0}
OF = 10.0
"""The largest factor of `silu_of_10`."""
TINY = 1e-20
"""Added to the sum that weights are divided by, as in DeepSeek's code: sigmoids may all be 0."""


def gated(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """Ops.activate_mul."""
    if kind == "silu_of_10":
        return silu(gate.clamp(max=OF)) * up.clamp(-OF, OF)
    if (limit := LIMITED.get(kind)) is not None:
        return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if kind != "clamped":
        return ACTIVATIONS[kind](gate) * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gate * (SLOPE * gate).sigmoid() * (up + 1)


SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
    "softplus": lambda logits: softplus(logits).sqrt(),
}
Told = tuple[Tensor, Tensor]
"""The experts of each token [V * top_k], and the rows' tokens."""


def route(logits: Tensor, bias: Tensor | None, spec: RouterSpec, told: Told | None = None) -> tuple[Tensor, Tensor]:
    """logits [R, E], bias [E] -> (weights, expert ids), both [R, top_k], best choice first, or as told."""
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    scores = SCORES[spec.scoring](logits)
    choice = scores if bias is None else scores + bias
    if spec.num_groups > 1:
        choice = choice.masked_fill(~_in_top_groups(choice, spec), float("-inf"))
    if told is None:
        ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    else:
        ids = told[0].view(-1, spec.top_k)[told[1].flatten()]
    weights = scores.gather(1, ids)
    if spec.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights * spec.scale, ids


def _in_top_groups(choice: Tensor, spec: RouterSpec) -> Tensor:
    """bool [R, E]: is the expert in one of the row's best groups?"""
    groups = choice.unflatten(-1, (spec.num_groups, -1))
    best = groups.sort(dim=-1, descending=True).values[..., :2].sum(-1)
    taken = best.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_groups]
    among = torch.zeros_like(best, dtype=torch.bool).scatter(1, taken, torch.ones_like(taken, dtype=torch.bool))
    return among.repeat_interleave(groups.shape[-1], dim=-1)


def mixture(
    x: Tensor, logits: Tensor, bias: Tensor | None, experts: Experts, spec: RouterSpec, told: Told | None = None
) -> Tensor:
    """Ops.moe, for rows of any leading shape."""
    rows = x.flatten(0, -2)
    weights, ids = route(logits.flatten(0, -2), bias, spec, told)
    out = torch.zeros_like(rows)
    for expert in ids.unique().tolist():
        taking, place = torch.nonzero(ids == expert, as_tuple=True)
        weight = weights[taking, place, None].to(x.dtype)
        if expert >= spec.num_matrices:
            out = out.index_add(0, taking, rows[taking] * weight)
            continue
        read = rows[taking] * weight if spec.scales_inputs else rows[taking]
        up = linear(read, experts.up[expert], _bias(experts.up_bias, expert))
        if experts.gate:
            inner = gated(linear(read, experts.gate[expert], _bias(experts.gate_bias, expert)), up, experts.activation)
        else:
            inner = ACTIVATIONS[experts.activation](up)
        said = linear(inner, experts.down[expert], _bias(experts.down_bias, expert))
        out = out.index_add(0, taking, said if spec.scales_inputs else said * weight)
    return out.view_as(x)


def _bias(biases: Sequence[Tensor], expert: int) -> Tensor | None:
    return biases[expert] if biases else None
