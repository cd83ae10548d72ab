"""The head run for several draft steps from every origin at once, teacher-forced on the text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from headstart.heads.base import FIRST_PAIR_POSITION, HeadSpec, Module
from headstart.kernels.ops import StepInputs
from headstart.layers.decoder import together
from headstart.train.ops import DraftMemory, TrainOps


def unroll(
    modules: Sequence[Module], spec: HeadSpec, embedding: Tensor, hidden: Tensor, tokens: Tensor, depth: int
) -> list[Tensor]:
    """What the head reads of the trunk [B, T, W or taps x W] and tokens [B, T] -> y of draft steps 1..depth, each
    [B, T, W].

    Row p of step i reads token p + i; where the text ends before that, token 0 stands in and the row is worth nothing.
    """
    ops, filled = TrainOps(hidden.device, hidden.dtype), {0}
    memories = [together([DraftMemory() for _ in module.kv_specs]) for module in modules]
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
