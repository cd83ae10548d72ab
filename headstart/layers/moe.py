"""Mixture of experts: a router, routed experts, and shared experts for every row.

Canonical tensors under `{prefix}`: `gate.weight` [E, H] (the router), `gate.e_score_correction_bias` [E], experts one
by one (`experts.{e}.gate_proj.weight`, up_proj, down_proj) or stacked (`experts.gate_proj.weight` [E, I, H]; or
`experts.gate_up_proj` [E, 2 I, H] with `experts.down_proj` [E, H, I]), `shared_experts.{gate,up,down}_proj.weight`,
`shared_expert_gate.weight` [1, H]; `fc1_latent_proj.weight` [L, H] and `fc2_latent_proj.weight` [H, L] around routed
experts that read L columns (LatentMoE of Nemotron 3), `latent_norm.weight` [L] before the second (Kimi-K3).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
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
from headstart.layers.shapes import shapes_of
from headstart.layers.weights import Weights


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
    # rows of images have their own bias, `gate.image_bias` [E], and no table, if the checkpoint has it
    image_bias: bool = False
    num_kernels: ClassVar[int] = 10

    def routed_experts(self, hidden: int) -> RoutedExperts:
        """Sizes of the experts that have matrices; identity experts reduce the active ones in proportion."""
        router = self.router
        one = shapes_of(lambda weights: self._expert.build(weights, "expert", self.latent or hidden))
        active = max(round(router.top_k * router.num_matrices / router.num_experts), 1)
        return RoutedExperts(count=router.num_matrices, active=active, weights=num_elements(one))

    def build(self, weights: Weights, prefix: str, hidden: int) -> "MoE":
        """See FeedForwardConfig.build. Raises ModelError for missing tensors."""
        count, gate = self.router.num_experts, f"{prefix}.gate"
        router = weights.get(f"{gate}.weight", count, hidden, precise=True)
        bias = weights.get(f"{gate}.e_score_correction_bias", count) if self.bias else None
        table = self._table(weights, f"{gate}.table") if self.table else None
        router_bias = weights.get(f"{gate}.bias", count) if self.biases else None
        experts = raw_experts(weights, f"{prefix}.experts", self.latent or hidden, self)
        return MoE(
            router=Linear(router, router_bias),
            experts=build_experts(weights, experts, self.activation),
            spec=self.router,
            bias=bias,
            latent=(
                weights.linear(f"{prefix}.fc1_latent_proj", self.latent, hidden),
                weights.linear(f"{prefix}.fc2_latent_proj", hidden, self.latent),
            )
            if self.latent
            else None,
            latent_norm=weights.norm(f"{prefix}.latent_norm", self.latent, self.latent_eps)
            if self.latent_eps
            else None,
            shared=self._shared().build(weights, f"{prefix}.shared_experts", hidden) if self.shared else None,
            shared_gate=self._shared_gate(weights, f"{prefix}.shared_expert_gate.weight", hidden),
            table=table,
            image_bias=weights.get(f"{gate}.image_bias", count)
            if self.image_bias and weights.has(f"{gate}.image_bias")
            else None,
        )

    def _shared_gate(self, weights: Weights, name: str, hidden: int) -> Linear | None:
        if not self.shared_gate:
            return None
        gate = weights.raw(name, (1, hidden), (hidden,))
        return Linear(weights.take(lambda: gate.shaped(1, hidden), precise=True))

    def _table(self, weights: Weights, name: str) -> Weight:
        table = weights.raw(name, (self.table, self.router.top_k))

        def ids() -> NDArray[np.int64]:
            whole = isinstance(table, Tensor) and table.dtype in ("I64", "I32")
            found = table.numpy() if isinstance(table, Tensor) and whole else table.float32()
            if not ((found >= 0) & (found < self.router.num_experts)).all():
                raise ModelError(f"{weights.source}: {name} names experts beyond {self.router.num_experts}")
            return found.astype(np.int64).reshape(-1)

        return weights.index(ids)

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
    image_bias: Weight | None = None

    def __call__(self, ops: Ops, x: Buffer, token_ids: Buffer = None) -> Buffer:
        logits = self.router(ops, x)
        if self.shared is None:
            return self._routed(ops, x, logits, token_ids)
        gate = self.shared_gate(ops, x) if self.shared_gate else None
        shared = self.shared(ops, x)
        routed = self._routed(ops, x, logits, token_ids)
        return ops.add(routed, shared if gate is None else ops.sigmoid_mul(gate, shared))

    def _routed(self, ops: Ops, x: Buffer, logits: Buffer, token_ids: Buffer) -> Buffer:
        table, bias = (None if each is None else (each, token_ids) for each in (self.table, self.image_bias))
        assert (table or bias) is None or token_ids is not None, "experts by token id only work in a trunk"
        if self.latent is None:
            return ops.moe(x, logits, self.bias, self.experts, self.spec, table, bias)
        down, up = self.latent
        y = ops.moe(down(ops, x), logits, self.bias, self.experts, self.spec, table, bias)
        return up(ops, self.latent_norm(ops, y) if self.latent_norm else y)


def raw_experts(weights: Weights, prefix: str, hidden: int, config: MoEConfig) -> dict[str, Iterable[RawTensor]]:
    """The experts' matrices and biases by field of Experts, in any of the layouts above."""
    count, inner = config.router.num_matrices, config.inner
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    if not config.gated:
        del shapes["gate"]
    stacks: dict[str, Iterable[RawTensor]] = {}
    if weights.has(f"{prefix}.gate_up_proj"):
        both = weights.raw(f"{prefix}.gate_up_proj", (count, 2 * inner, hidden))
        stacks = {
            "gate": _items(both, np.arange(inner)),
            "up": _items(both, np.arange(inner, 2 * inner)),
            "down": _items(weights.raw(f"{prefix}.down_proj", (count, hidden, inner))),
        }
    elif weights.has(f"{prefix}.up_proj.weight"):
        stacks = {
            name: _items(weights.raw(f"{prefix}.{name}_proj.weight", (count, *shape))) for name, shape in shapes.items()
        }
    single = defaultdict[str, list[RawTensor]](list)
    for expert in range(count):
        for name, shape in () if stacks else shapes.items():
            single[name].append(weights.raw(f"{prefix}.{expert}.{name}_proj.weight", shape))
        for name, shape in shapes.items() if config.biases else ():
            single[f"{name}_bias"].append(weights.raw(f"{prefix}.{expert}.{name}_proj.bias", shape[:1]))
    return {"gate": (), **stacks, **single}


def build_experts(weights: Weights, parts: Mapping[str, Iterable[RawTensor]], activation: Activation) -> Experts:
    """Converts the parts of `raw_experts`."""
    taken = {name: weights.take_each(partial(iter, each)) for name, each in parts.items()}
    return Experts(**taken, activation=activation)


def _items(stack: RawTensor, rows: NDArray[np.int64] | None = None) -> Iterator[RawTensor]:
    """The matrices of a stack, or some rows of each."""
    for index in range(stack.shape[0]):
        item = stack.part(index)
        yield item if rows is None else item.take_rows(rows)
