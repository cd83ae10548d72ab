"""Medusa (Cai et al. 2024, section 2.1.1): one residual layer for each draft step, all over the same hidden state.

y_k = h_p + silu(W_k h_p + b_k) guesses t_{p+1+k}; the LM head is the trunk's. No attention, no token goes in.
Canonical tensors: `medusa.{k}.weight`, `medusa.{k}.bias`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from headstart.heads.base import HeadKind, Start, Training, Values
from headstart.kernels.ops import Buffer, Ops, Pool, StepInputs
from headstart.layers.head import HeadSpec
from headstart.layers.linear import Linear
from headstart.layers.weights import Weights


@dataclass(frozen=True)
class MedusaModule:
    """The head of one draft step."""

    layer: Linear
    kv_spec: None = None

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]:
        """As layers.head.Module; step.hidden goes on as it is, for the next step's head."""
        return ops.add(step.hidden, ops.silu(self.layer(ops, step.hidden))), step.hidden


def modules(weights: Weights, spec: HeadSpec, hidden: int) -> Seq[MedusaModule]:
    return [MedusaModule(weights.linear(f"medusa.{k}", hidden, hidden, bias=True)) for k in range(spec.num_modules)]


def initial(start: Start, spec: HeadSpec) -> dict[str, Values]:
    """Zeros, as in the paper: every head begins as the trunk's own next-token guess."""
    width = len(start.norm)
    matrix, bias = np.zeros((width, width), np.float32), np.zeros(width, np.float32)
    return {f"medusa.{k}.{part}": x for k in range(spec.num_modules) for part, x in (("weight", matrix), ("bias", bias))}


HEAD = HeadKind(
    modules=modules,
    training=Training(spec=lambda layers, depth: HeadSpec(kind="medusa", num_modules=depth), initial=initial),
)
