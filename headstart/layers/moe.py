"""Mixture of experts: a router, routed experts, and shared experts for every row.

Canonical tensors under `{prefix}`: `gate.weight` [E, H] (the router), `gate.e_score_correction_bias` [E], experts one
by one (`experts.{e}.gate_proj.weight`, up_proj, down_proj) or stacked (`experts.gate_proj.weight` [E, I, H]; or
`experts.gate_up_proj` [E, 2 I, H] with `experts.down_proj` [E, H, I]), `shared_experts.{gate,up,down}_proj.weight`,
`shared_expert_gate.weight` [1, H]; `fc1_latent_proj.weight` [L, H] and `fc2_latent_proj.weight` [H, L] around routed
experts that read L columns (LatentMoE of Nemotron 3), `latent_norm.weight` [L] before the second (Kimi-K3).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.kernels.ops import Activation, Buffer, Experts, Ops, RawTensor, RouterSpec, Weight
from headstart.layers.costs import RoutedExperts, num_elements
from headstart.layers.linear import Linear
from headstart.layers.mlp import MLPConfig
from headstart.layers.norm import RMSNorm
from headstart.layers.parts import FeedForward
from headstart.layers.weights import Shapes, Weights


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts."""

    router: RouterSpec
    inner: int  # intermediate size of one expert
    shared: int = 0  # intermediate size of the shared experts together; 0: none
    shared_gate: bool = False  # shared experts are scaled by sigmoid(w . x)
    bias: bool = False  # the selection of experts has a bias (e_score_correction_bias)
    activation: Activation = "silu"
    shared_activation: Activation | None = None  # of the shared experts; None: the same
    shared_scale: float = 1.0  # multiplies the output of the shared experts
    biases: bool = False  # the router and all matrices of experts have biases
    gated: bool = True  # experts have a gate_proj
    latent: int = 0  # columns that routed experts read and write between two shared matrices (LatentMoE); 0: none
    latent_eps: float = 0.0  # of a norm of what these experts write; 0: no norm
    always: int = 0  # the last of the routed experts, which every row takes: their biases are large
    table: int = 0  # rows of `gate.table` [V, top_k], which names the experts of each token; 0: the router selects
    num_kernels: ClassVar[int] = 10

    def routed_experts(self, hidden: int) -> RoutedExperts:
        """Sizes of the experts that have matrices; identity experts reduce the active ones in proportion."""
        router, one = self.router, self._expert.shapes("expert", self.latent or hidden)
        active = max(round(router.top_k * router.num_matrices / router.num_experts), 1)
        return RoutedExperts(count=router.num_matrices, active=active, weights=num_elements(one))

    def build(self, weights: Weights, prefix: str, hidden: int) -> "MoE":
        """See FeedForwardConfig.build. Raises ModelError for missing tensors."""
        count, gate = self.router.num_experts, f"{prefix}.shared_expert_gate.weight"
        return MoE(
            router=Linear(
                weights.get(f"{prefix}.gate.weight", count, hidden, precise=True),
                weights.get(f"{prefix}.gate.bias", count) if self.biases else None,
            ),
            experts=read_experts(weights, f"{prefix}.experts", self.latent or hidden, self),
            spec=self.router,
            bias=weights.get(f"{prefix}.gate.e_score_correction_bias", count) if self.bias else None,
            shared=self._shared().build(weights, f"{prefix}.shared_experts", hidden) if self.shared else None,
            shared_gate=Linear(weights.take(weights.raw(gate, (1, hidden), (hidden,)).shaped(1, hidden), precise=True))
            if self.shared_gate
            else None,
            latent=(
                weights.linear(f"{prefix}.fc1_latent_proj", self.latent, hidden),
                weights.linear(f"{prefix}.fc2_latent_proj", hidden, self.latent),
            )
            if self.latent
            else None,
            latent_norm=weights.norm(f"{prefix}.latent_norm", self.latent, self.latent_eps)
            if self.latent_eps
            else None,
            table=self._table(weights, f"{prefix}.gate.table"),
        )

    def _table(self, weights: Weights, name: str) -> Weight | None:
        if not self.table:
            return None
        table = weights.raw(name, (self.table, self.router.top_k))
        whole = isinstance(table, Tensor) and table.dtype in ("I64", "I32")
        ids = table.numpy() if isinstance(table, Tensor) and whole else table.float32()
        if not ((ids >= 0) & (ids < self.router.num_experts)).all():
            raise ModelError(f"{weights.source}: {name} names experts beyond {self.router.num_experts}")
        return weights.backend.index(ids.astype(np.int64).reshape(-1))

    def shapes(self, prefix: str, hidden: int) -> Shapes:
        """Names (experts one by one) and shapes of what `build` takes."""
        count = self.router.num_experts
        shapes: Shapes = {f"{prefix}.gate.weight": (count, hidden)}
        if self.bias:
            shapes[f"{prefix}.gate.e_score_correction_bias"] = (count,)
        if self.table:
            shapes[f"{prefix}.gate.table"] = (self.table, self.router.top_k)
        if self.biases:
            shapes[f"{prefix}.gate.bias"] = (count,)
        for expert in range(self.router.num_matrices):
            shapes |= self._expert.shapes(f"{prefix}.experts.{expert}", self.latent or hidden)
        if self.latent:
            shapes[f"{prefix}.fc1_latent_proj.weight"] = (self.latent, hidden)
            shapes[f"{prefix}.fc2_latent_proj.weight"] = (hidden, self.latent)
        if self.latent_eps:
            shapes[f"{prefix}.latent_norm.weight"] = (self.latent,)
        if self.shared:
            shapes |= self._shared().shapes(f"{prefix}.shared_experts", hidden)
        if self.shared_gate:
            shapes[f"{prefix}.shared_expert_gate.weight"] = (1, hidden)
        return shapes

    @property
    def _expert(self) -> MLPConfig:
        return MLPConfig(inner=self.inner, activation=self.activation, gated=self.gated, bias=self.biases)

    def _shared(self) -> MLPConfig:
        activation = self.shared_activation or self.activation
        scale = self.shared_scale
        return MLPConfig(inner=self.shared, activation=activation, gated=self.gated, output_scale=scale)


@dataclass(frozen=True)
class MoE:
    """sum over the row's experts of weight * down(activation(gate(x)) * up(x)), plus the shared experts."""

    router: Linear
    experts: Experts
    spec: RouterSpec
    bias: Weight | None = None
    shared: FeedForward | None = None
    shared_gate: Linear | None = None
    latent: tuple[Linear, Linear] | None = None
    latent_norm: RMSNorm | None = None
    table: Weight | None = None

    def __call__(self, ops: Ops, x: Buffer, token_ids: Buffer = None) -> Buffer:
        logits = self.router(ops, x)
        assert self.table is None or token_ids is not None, "experts by token id only work in a trunk"
        token_experts = None if self.table is None else (self.table, token_ids)
        if self.shared is None:
            return self._routed(ops, x, logits, token_experts)
        gate = self.shared_gate(ops, x) if self.shared_gate else None
        shared = self.shared(ops, x)
        routed = self._routed(ops, x, logits, token_experts)
        return ops.add(routed, shared if gate is None else ops.sigmoid_mul(gate, shared))

    def _routed(self, ops: Ops, x: Buffer, logits: Buffer, token_experts: tuple[Weight, Buffer] | None) -> Buffer:
        if self.latent is None:
            return ops.moe(x, logits, self.bias, self.experts, self.spec, token_experts)
        down, up = self.latent
        y = ops.moe(down(ops, x), logits, self.bias, self.experts, self.spec, token_experts)
        return up(ops, self.latent_norm(ops, y) if self.latent_norm else y)


def read_experts(
    weights: Weights, prefix: str, hidden: int, config: MoEConfig, factors: NDArray[np.float32] | None = None
) -> Experts:
    """The experts' matrices in any of the layouts above; `factors` [E] multiply the output of each."""
    count, inner = config.router.num_matrices, config.inner
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if not config.gated:
        del shapes["gate"]
    parts: dict[str, Iterator[RawTensor]]
    if weights.has(f"{prefix}.gate_up_proj"):
        both = weights.raw(f"{prefix}.gate_up_proj", (count, 2 * inner, hidden))
        parts = {
            "gate": _items(both, np.arange(inner)),
            "up": _items(both, np.arange(inner, 2 * inner)),
            "down": _items(weights.raw(f"{prefix}.down_proj", (count, hidden, inner))),
        }
    elif weights.has(f"{prefix}.up_proj.weight"):
        parts = {
            name: _items(weights.raw(f"{prefix}.{name}_proj.weight", (count, *shape))) for name, shape in shapes.items()
        }
    else:
        parts = {
            name: map(weights.raw, [f"{prefix}.{e}.{name}_proj.weight" for e in range(count)], [shape] * count)
            for name, shape in shapes.items()
        }
    if factors is not None:
        parts["down"] = (each.affine(float(factor), 0) for each, factor in zip(parts["down"], factors, strict=True))
    taken = {name: tuple(map(weights.take, parts[name])) for name in shapes}
    biased = range(count if config.biases else 0)
    biases = {
        name: tuple(weights.get(f"{prefix}.{e}.{name}_proj.bias", shape[0]) for e in biased)
        for name, shape in shapes.items()
    }
    gate, up, down = (taken.get(name, ()) for name in ("gate", "up", "down"))
    return Experts(gate, up, down, config.activation, *(biases.get(name, ()) for name in ("gate", "up", "down")))


def _items(stack: RawTensor, rows: NDArray[np.int64] | None = None) -> Iterator[RawTensor]:
    """The matrices of a stack, or some rows of each."""
    for index in range(stack.shape[0]):
        item = stack.part(index)
        yield item if rows is None else item.take_rows(rows)
