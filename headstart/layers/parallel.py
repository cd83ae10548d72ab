"""Two parts side by side: attention and Mamba2 (Falcon-H1), or an MLP and experts (Gemma 4 26B-A4B).

ParallelMixers (TII 2025): y = a attention(r x) + m mamba2(x), with the tensors of layers/attention.py and
layers/mamba2.py under the same layer.

ParallelMoE (transformers 5.23, `modeling_gemma4.py`), each part with norms of its own:

    y = norm_1(mlp(norm(x))) + norm_2(experts(pre_norm_2(x), chosen by W (scale * x / (rms(x) sqrt(H)))))

`per_expert_scale` multiplies an expert's output; it is folded into the expert's down matrix. Canonical tensors: the
MLP's under `{layer}.mlp`; under `{layer}`: `router.{proj.weight,scale,per_expert_scale}`, `experts.*` as in moe.py,
`pre_feedforward_layernorm`, `pre_feedforward_layernorm_2`, `post_feedforward_layernorm_{1,2}`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from headstart.kernels.ops import AttentionSpec, Buffer, Experts, KVSpec, Ops, Pool, RawTensor, RouterSpec
from headstart.kernels.specs import StateSpec
from headstart.layers.attention import Attention, AttentionConfig
from headstart.layers.costs import RoutedExperts
from headstart.layers.linear import Linear, scale
from headstart.layers.mamba2 import Mamba2, Mamba2Config
from headstart.layers.mlp import MLPConfig
from headstart.layers.moe import MoEConfig, build_experts, raw_experts
from headstart.layers.norm import RMSNorm
from headstart.layers.parts import FeedForward, Mixer, MixerConfig, split_pools
from headstart.layers.weights import Weights


@dataclass(frozen=True, kw_only=True)
class ParallelMixersConfig(MixerConfig):
    """Both mixers and their multipliers."""

    attention: AttentionConfig
    mamba: Mamba2Config
    attention_in: float = 1.0  # multiplies the input of attention
    attention_out: float = 1.0  # multiplies the output of attention
    mamba_out: float = 1.0  # multiplies the output of Mamba2

    @property
    def attention_spec(self) -> AttentionSpec:
        return self.attention.attention_spec

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        return self.attention.kv_specs

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return self.mamba.state_specs

    @property
    def num_kernels(self) -> int:
        return self.attention.num_kernels + self.mamba.num_kernels

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, in_features: int) -> "ParallelMixers":
        """See MixerConfig.build."""
        return ParallelMixers(
            attention=self.attention.build(weights, prefix, hidden, eps=eps, in_features=in_features),
            mamba=self.mamba.build(weights, prefix, hidden, eps=eps, in_features=in_features),
            config=self,
        )


@dataclass(frozen=True)
class ParallelMixers(Mixer):
    """Attention and Mamba2 over the same rows."""

    attention: Attention
    mamba: Mamba2
    config: ParallelMixersConfig

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        """`pool`: the KV pool, then the pools of Mamba2; in training the first alone."""
        kv, *states = split_pools(pool)
        scanned = self.mamba(ops, x, positions, tuple(states) or None)
        attended = self.attention(ops, scale(ops, x, self.config.attention_in), positions, kv)
        return ops.add(scale(ops, attended, self.config.attention_out), scale(ops, scanned, self.config.mamba_out))


NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm_1", "pre_feedforward_layernorm_2",
         "post_feedforward_layernorm_2")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ParallelMoEConfig:
    """An MLP beside a mixture of experts."""

    mlp: MLPConfig
    experts: MoEConfig
    eps: float  # of the norms
    num_kernels: ClassVar[int] = 10

    def routed_experts(self, hidden: int) -> RoutedExperts:
        return self.experts.routed_experts(hidden)

    @property
    def inner(self) -> int:
        return self.mlp.inner

    def build(self, weights: Weights, prefix: str, hidden: int) -> "ParallelMoE":
        """See FeedForwardConfig.build; `prefix` is that of the layer's MLP."""
        layer, count = prefix.rpartition(".")[0], self.experts.router.num_experts
        mlp = self.mlp.build(weights, prefix, hidden)
        experts = raw_experts(weights, f"{layer}.experts", hidden, self.experts)
        norms = {name: weights.norm(f"{layer}.{name}", hidden, self.eps) for name in NORMS}
        router = weights.get(f"{layer}.router.proj.weight", count, hidden, precise=True)
        scale = weights.raw(f"{layer}.router.scale", (hidden,))
        factors = weights.raw(f"{layer}.router.per_expert_scale", (count,))

        def scaled_down() -> Iterator[RawTensor]:
            return (each.affine(float(by), 0) for each, by in zip(experts["down"], factors.float32(), strict=True))

        return ParallelMoE(
            mlp_norm=norms[NORMS[0]],
            mlp_output_norm=norms[NORMS[1]],
            experts_norm=norms[NORMS[2]],
            experts_output_norm=norms[NORMS[3]],
            mlp=mlp,
            router_norm=RMSNorm(weights.take(lambda: scale.affine(hidden**-0.5, 0), precise=True), self.eps),
            router=Linear(router),
            experts=build_experts(weights, {**experts, "down": scaled_down()}, self.experts.activation),
            spec=self.experts.router,
        )


@dataclass(frozen=True)
class ParallelMoE:
    """Sum of an MLP and experts. The input is the stream before any norm."""

    mlp_norm: RMSNorm
    mlp_output_norm: RMSNorm
    experts_norm: RMSNorm
    experts_output_norm: RMSNorm
    mlp: FeedForward
    router_norm: RMSNorm
    router: Linear
    experts: Experts
    spec: RouterSpec

    def __call__(self, ops: Ops, x: Buffer, token_ids: Buffer = None) -> Buffer:
        dense = self.mlp_output_norm(ops, self.mlp(ops, self.mlp_norm(ops, x)))
        logits = self.router(ops, self.router_norm(ops, x))
        routed = ops.moe(self.experts_norm(ops, x), logits, None, self.experts, self.spec)
        return ops.add(dense, self.experts_output_norm(ops, routed))
