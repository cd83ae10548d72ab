"""An MLP and a mixture of experts side by side over the same stream, each with norms of its own (Gemma 4's 26B-A4B).
Formula: transformers 5.23, `modeling_gemma4.py`:

    y = norm_1(mlp(norm(x))) + norm_2(experts(pre_norm_2(x), chosen by W (scale * x / (rms(x) sqrt(H)))))

An expert's output is multiplied by its own number; here its down matrix is.

Canonical tensors: the MLP's under `{layer}.mlp`; under `{layer}`: `router.{proj.weight,scale,per_expert_scale}`,
`experts.*` as in moe.py, `pre_feedforward_layernorm`, `pre_feedforward_layernorm_2`,
`post_feedforward_layernorm_{1,2}`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headstart.kernels.ops import Buffer, Experts, Ops, RouterSpec
from headstart.layers.decoder import FeedForward
from headstart.layers.linear import Linear
from headstart.layers.mlp import MLPConfig
from headstart.layers.moe import MoEConfig, read_experts
from headstart.layers.norm import RMSNorm
from headstart.layers.weights import Shapes, Weights

NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2",
         "post_feedforward_layernorm_2")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ParallelMoEConfig:
    """`mlp`: the part that every row takes; `experts`: the others."""

    mlp: MLPConfig
    experts: MoEConfig
    eps: float

    @property
    def inner(self) -> int:
        return self.mlp.inner

    def build(self, weights: Weights, prefix: str, hidden: int) -> ParallelMoE:
        """From the tensors of the layer whose MLP is `prefix` (no trailing dot)."""
        layer, count = prefix.rpartition(".")[0], self.experts.router.num_experts
        scale = weights.raw(f"{layer}.router.scale", (hidden,)).affine(hidden**-0.5, 0)
        factors = weights.raw(f"{layer}.router.per_expert_scale", (count,)).float32()
        norms = {name: weights.norm(f"{layer}.{name}", hidden, self.eps) for name in NORMS}
        return ParallelMoE(
            mlp_norm=norms[NORMS[0]],
            mlp_output_norm=norms[NORMS[1]],
            experts_norm=norms[NORMS[2]],
            experts_output_norm=norms[NORMS[3]],
            mlp=self.mlp.build(weights, prefix, hidden),
            router_norm=RMSNorm(weights.take(scale, precise=True), self.eps),
            router=Linear(weights.get(f"{layer}.router.proj.weight", count, hidden, precise=True)),
            experts=read_experts(weights, f"{layer}.experts", hidden, self.experts, factors),
            spec=self.experts.router,
        )

    def shapes(self, prefix: str, hidden: int) -> Shapes:
        """Names (experts one by one) and shapes of those tensors."""
        layer, count = prefix.rpartition(".")[0], self.experts.router.num_experts
        routed = replace(self.experts, bias=False, shared=0).shapes(layer, hidden)
        return {
            **self.mlp.shapes(prefix, hidden),
            **{name: shape for name, shape in routed.items() if ".experts." in name},
            **{f"{layer}.{name}.weight": (hidden,) for name in NORMS},
            f"{layer}.router.proj.weight": (count, hidden),
            f"{layer}.router.scale": (hidden,),
            f"{layer}.router.per_expert_scale": (count,),
        }


@dataclass(frozen=True)
class ParallelMoE:
    """Of the stream itself."""

    mlp_norm: RMSNorm
    mlp_output_norm: RMSNorm
    experts_norm: RMSNorm
    experts_output_norm: RMSNorm
    mlp: FeedForward
    router_norm: RMSNorm
    router: Linear
    experts: Experts
    spec: RouterSpec

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        dense = self.mlp_output_norm(ops, self.mlp(ops, self.mlp_norm(ops, x)))
        logits = self.router(ops, self.router_norm(ops, x))
        routed = ops.moe(self.experts_norm(ops, x), logits, None, self.experts, self.spec)
        return ops.add(dense, self.experts_output_norm(ops, routed))
