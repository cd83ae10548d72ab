"""EAGLE-3 (Li et al. 2025): the trunk's streams at three depths, fused, and the next token in; a guess out.

g = fc [a_1 ; a_2 ; a_3]; one block reads [norm_e(e(t_{p+1})) ; norm_h(g)] in its attention, g as its residual stream;
logits = lm_head(norm(x')). The next draft step reads x' (before the norm) in place of g. vLLM 0.32,
`model_executor/models/llama_eagle3.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from headstart.kernels.ops import AttentionSpec, Buffer, Ops, Pool, StepInputs
from headstart.layers.decoder import DecoderLayer
from headstart.layers.linear import Linear
from headstart.layers.mtp import HeadSpec
from headstart.layers.norm import RMSNorm


@dataclass(frozen=True)
class Eagle3Module:
    """`block.input_norm` is the embedding's; q, k and v of the block read 2 H columns."""

    fuse: Linear
    hidden_norm: RMSNorm
    block: DecoderLayer
    norm: RMSNorm
    norm_before_residual: bool = False

    @property
    def kv_spec(self) -> AttentionSpec | None:
        return self.block.mixer.kv_spec

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]:
        """Embedded tokens [R, H], step.hidden [R, 3 H] (tapped) or [R, H] (recycled) -> (y, recycled), both [R, H]."""
        g = step.hidden if recycled else self.fuse(ops, step.hidden)
        h = self.hidden_norm(ops, g)
        x = ops.concat(self.block.input_norm(ops, embedded), h)
        attended = self.block.mixer(ops, x, step.positions, pool)
        x, residual = self.block.post_norm.add(ops, attended, h if self.norm_before_residual else g)
        y, stream = self.norm.add(ops, self.block.mlp(ops, x), residual)
        return y, y if spec.recycle == "post_norm" else stream
