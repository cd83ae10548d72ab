"""Comparison of block drafters with readings of public code: logits, tokens and confidences."""

from typing import Any, Protocol

import numpy as np
import torch
from support import make, new_sequence
from torch import Tensor

from headstart.drafters.base import DraftRequest
from headstart.drafters.block import BLOCK
from headstart.engine.load import Model

TOLERANCE = {"reference": 1e-4, "native": 1e-3}
"""Of logits."""


class BlockReading(Protocol):
    """A drafter's formulas in torch. `states`: taps [N, taps * H] of positions 0 .. N - 1; `anchor`: the token at N."""

    def __call__(self, states: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
        """Logits [B, V] without the Markov head, and the Markov head's other input [B, H]."""

    def draft(self, states: Tensor, anchor: int) -> tuple[list[int], list[float]]:
        """Greedy tokens of a block, and the confidence in each."""


def rotate_pairs(x: Tensor, positions: Tensor, theta: float, width: int, *, inverse: bool = False) -> Tensor:
    """[R, heads, D]: rotates pairs of neighbours among the last `width` features."""
    angles = positions.double()[:, None, None] * theta ** (-torch.arange(0, width, 2).double() / width)
    turn = torch.polar(torch.ones_like(angles), -angles if inverse else angles)
    pairs = torch.view_as_complex(x[..., -width:].double().unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((x[..., :-width], torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)), -1)


def sinkhorn(x: Tensor, steps: int, eps: float) -> Tensor:
    """Mixing matrices [R, n, n] of hyper-connections from their logits [R, n * n]."""
    n = int(x.shape[-1] ** 0.5)
    square = x.unflatten(-1, (n, n)).softmax(-1) + eps
    square = square / (square.sum(-2, keepdim=True) + eps)
    for _ in range(steps - 1):
        square = square / (square.sum(-1, keepdim=True) + eps)
        square = square / (square.sum(-2, keepdim=True) + eps)
    return square


def assert_drafts(model: Model, reading: BlockReading, taps: Tensor, tokens: list[int], **how: Any) -> None:
    """Checks that the drafter of `model` computes the block after `tokens` like the reading. taps: [T, taps * H]."""
    size = model.head.spec.block.block_size
    expected, _ = reading(taps[:-1], tokens[-1])
    engine = make(model, depth=size, drafter="block", block_size=16, **how)
    drafter, sequence = engine.drafting.drafter, new_sequence(engine, tokens, computed=len(tokens) - 1)
    wanted, tolerance = DraftRequest(sequence, size, None), TOLERANCE[how["backend"]]
    drafter._catch_up([sequence])
    output = engine.runner.run(drafter._network, BLOCK, [drafter._rows(wanted)])
    logits = torch.as_tensor(np.asarray(engine.runner.backend.numpy(output["logits"]))).double()
    torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0)
    assert expected.std() > 0.5
    drafter.propose([wanted])
    drafted, confidences = reading.draft(taps[:-1], tokens[-1])
    assert sequence.draft.tokens == drafted
    np.testing.assert_allclose(sequence.draft.scores, confidences, atol=tolerance)
