"""Medusa (Cai et al. 2024, section 2.1.1): one residual layer for each draft step, all over the same hidden state.

y_k = h_p + silu(W_k h_p + b_k) guesses t_{p+1+k}; the LM head is the trunk's. No attention, no token goes in.
"""

from __future__ import annotations

from dataclasses import dataclass

from headstart.kernels.ops import Buffer, Ops, Pool, StepInputs
from headstart.layers.linear import Linear
from headstart.layers.mtp import HeadSpec


@dataclass(frozen=True)
class MedusaModule:
    """The head of one draft step."""

    layer: Linear
    kv_spec: None = None

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]:
        """step.hidden [R, H] -> (y [R, H], step.hidden as it is, for the next step's head)."""
        return ops.add(step.hidden, ops.activate(self.layer(ops, step.hidden), "silu")), step.hidden
