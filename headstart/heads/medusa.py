"""Medusa (Cai et al. 2024, section 2.1.1): one residual layer for each draft step, all over the same hidden state.

y_k = h_p + silu(W_k h_p + b_k) guesses t_{p+1+k}; the LM head is the trunk's. No attention, no token goes in.
Canonical tensors: `medusa.{k}.weight`, `medusa.{k}.bias`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from headstart.heads.base import HeadSpec
from headstart.heads.kind import HeadKind, Start, Training, Values
from headstart.kernels.ops import Buffer, Ops, Pool, StepInputs
from headstart.layers.linear import Linear
from headstart.layers.weights import Shapes, Weights


@dataclass(frozen=True)
class MedusaModule:
    """The head of one draft step."""

    layer: Linear
    kv_specs: tuple[()] = ()

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]:
        """As heads.base.Module; step.hidden goes on as it is, for the next step's head."""
        return ops.add(step.hidden, ops.activate(self.layer(ops, step.hidden), "silu")), step.hidden


def modules(weights: Weights, spec: HeadSpec, hidden: int) -> Seq[MedusaModule]:
    return [MedusaModule(weights.linear(f"medusa.{k}", hidden, hidden, bias=True)) for k in range(spec.num_modules)]


def shapes(spec: HeadSpec, hidden: int) -> Shapes:
    names = [f"medusa.{k}" for k in range(spec.num_modules)]
    return {f"{name}.weight": (hidden, hidden) for name in names} | {f"{name}.bias": (hidden,) for name in names}


def initial(start: Start, spec: HeadSpec) -> dict[str, Values]:
    """Zeros, as in the paper: every head begins as the trunk's own next-token guess."""
    return {name: np.zeros(shape, np.float32) for name, shape in shapes(spec, len(start.norm)).items()}


HEAD = HeadKind(
    title="Medusa",
    modules=modules,
    shapes=shapes,
    block=False,
    training=Training(spec=lambda layers, depth: HeadSpec(kind="medusa", num_modules=depth), initial=initial),
)
