"""Mixture of experts in plain torch: activations, routing, and the weighted sum of expert outputs."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu, silu, softplus

from headstart.core import IMAGE_ROW
from headstart.kernels.ops import SITU, Activation, Experts, RouterSpec

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu, "gelu": gelu, "gelu_tanh": partial(gelu, approximate="tanh"), "relu": relu,
    "relu2": lambda x: relu(x).square(), "identity": lambda x: x,
}  # fmt: skip
CLAMP, SLOPE = 7.0, 1.702  # bound of both factors, and slope of the sigmoid, of the `clamped` activation (gpt-oss)
OUTPUT_LIMITS: Mapping[Activation, float] = {"silu_7": 7.0, "silu_16": 16.0}
INPUT_LIMIT = 10.0  # bound of both inputs of `silu_of_10`
WEIGHT_SUM_EPSILON = 1e-20  # added to the sum of scores before division, as in DeepSeek's code: all sigmoids may be 0


def gated(gate: Tensor, up: Tensor, kind: Activation) -> Tensor:
    """Ops.activate_mul."""
    if kind == "situ":
        soft_gate, soft_up = (each * (x / each).tanh() for x, each in zip((gate, up), SITU, strict=True))
        return soft_gate * gate.sigmoid() * soft_up
    if kind == "silu_of_10":
        return silu(gate.clamp(max=INPUT_LIMIT)) * up.clamp(-INPUT_LIMIT, INPUT_LIMIT)
    if (limit := OUTPUT_LIMITS.get(kind)) is not None:
        return silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if kind != "clamped":
        return ACTIVATIONS[kind](gate) * up
    gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP)
    return gate * (SLOPE * gate).sigmoid() * (up + 1)


SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
    "softplus": lambda logits: softplus(logits).sqrt(),
}
ByToken = tuple[Tensor, Tensor]  # (experts of each token id [V * top_k], or bias [E]; token ids of the rows [R])


def route(
    logits: Tensor, bias: Tensor | None, spec: RouterSpec, token_experts: ByToken | None = None,
    image_bias: ByToken | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """logits [R, E], bias [E] -> (weights, expert ids), both [R, top_k]: best first, or as in token_experts."""
    logits = logits.float() if logits.dtype == torch.bfloat16 else logits
    scores = SCORES[spec.scoring](logits)
    choice = scores if bias is None else scores + bias
    is_image = torch.zeros((), dtype=torch.bool, device=scores.device)
    if image_bias is not None:
        is_image = (image_bias[1].flatten() == IMAGE_ROW)[:, None]
        choice = torch.where(is_image, scores + image_bias[0], choice)
    if spec.num_groups > 1:
        choice = choice.masked_fill(~_in_top_groups(choice, spec), float("-inf"))
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_k]
    if token_experts is not None:
        ids = torch.where(is_image, ids, token_experts[0].view(-1, spec.top_k)[token_experts[1].flatten()])
    weights = scores.gather(1, ids)
    if spec.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + WEIGHT_SUM_EPSILON)
    return weights * spec.scale, ids


def _in_top_groups(choice: Tensor, spec: RouterSpec) -> Tensor:
    """bool [R, E]: True if the expert is in one of the row's top_groups best groups."""
    groups = choice.unflatten(-1, (spec.num_groups, -1))
    best = groups.sort(dim=-1, descending=True).values[..., :2].sum(-1)
    top = best.sort(dim=-1, descending=True, stable=True).indices[:, : spec.top_groups]
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter(1, top, torch.ones_like(top, dtype=torch.bool))
    return allowed.repeat_interleave(groups.shape[-1], dim=-1)


def mixture(
    x: Tensor, logits: Tensor, bias: Tensor | None, experts: Experts, spec: RouterSpec,
    token_experts: ByToken | None = None, image_bias: ByToken | None = None,
) -> Tensor:  # fmt: skip
    """Ops.moe for x of any leading shape."""
    rows = x.flatten(0, -2)
    weights, ids = route(logits.flatten(0, -2), bias, spec, token_experts, image_bias)
    out = torch.zeros_like(rows)
    for expert in ids.unique().tolist():
        row, place = torch.nonzero(ids == expert, as_tuple=True)
        weight = weights[row, place, None].to(x.dtype)
        if expert >= spec.num_matrices:
            out = out.index_add(0, row, rows[row] * weight)
            continue
        read = rows[row] * weight if spec.scales_inputs else rows[row]
        up = linear(read, experts.up[expert], _bias(experts.up_bias, expert))
        if experts.gate:
            inner = gated(linear(read, experts.gate[expert], _bias(experts.gate_bias, expert)), up, experts.activation)
        else:
            inner = ACTIVATIONS[experts.activation](up)
        output = linear(inner, experts.down[expert], _bias(experts.down_bias, expert))
        out = out.index_add(0, row, output if spec.scales_inputs else output * weight)
    return out.view_as(x)


def _bias(biases: Sequence[Tensor], expert: int) -> Tensor | None:
    return biases[expert] if biases else None
