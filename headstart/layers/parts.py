"""Interfaces of a layer's parts (mixer, feed-forward part, post block) and of the configs that build them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from headstart.kernels.ops import AttentionSpec, Buffer, KVSpec, Ops, Pool
from headstart.kernels.specs import CompressSpec, ConvSpec, DeltaSpec, IndexSpec, StateSpec
from headstart.layers.costs import NO_EXPERTS, MixerCost, RoutedExperts
from headstart.layers.weights import Weights


def join_pools(pools: Sequence[Pool]) -> Pool:
    """The `pool` argument of a mixer or a module: its only pool, or a tuple of its pools."""
    return pools[0] if len(pools) == 1 else tuple(pools)


def split_pools(pool: Pool) -> tuple[Pool, ...]:
    """The pools that `join_pools` joined."""
    return pool if isinstance(pool, tuple) else (pool,)


class MixerConfig:
    """Describes a mixer: its caches, inputs, tensors and cost."""

    @property
    def num_kernels(self) -> int:
        """Launches per layer, fused where engines usually fuse."""
        raise NotImplementedError

    @property
    def source_layer(self) -> int | None:
        """Index of the earlier layer whose keys and values, or whose selected positions, this layer reads."""
        return None

    @property
    def attention_spec(self) -> AttentionSpec | None:
        """How rows read keys and values; None for a recurrence."""
        return None

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """One KV pool each; empty where it reads those of `source_layer`."""
        return ()

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """One state pool each."""
        return ()

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, in_features: int) -> "Mixer":
        """Builds the mixer of `prefix` (no trailing dot). `in_features`: columns of its input; `eps`: of norms. Runs
        without a checkpoint, too (layers/shapes.py): all that depends on values is in callables of Weights."""
        raise NotImplementedError

    def cost(self, weights: int, source: "MixerConfig | None" = None) -> MixerCost:
        """Cost of a mixer with so many weights. `source`: the mixer of `source_layer`."""
        spec, specs = self.attention_spec, self.kv_specs
        read = (*specs, *(source.kv_specs if source else ()))
        indexes = [each for each in read if isinstance(each, IndexSpec)]
        own = next((each for each in specs if isinstance(each, IndexSpec)), None)
        compress = next((each for each in read if isinstance(each, CompressSpec)), None)
        window = (spec.window or spec.chunk) if spec else 0
        per_entry = indexes[0].every if indexes and indexes[0].whole and not compress else 1  # blocks of positions
        return MixerCost(
            weights=weights,
            num_kernels=self.num_kernels,
            kv_width=_pool_width(spec) if spec else 0,
            entry_work=spec.num_heads * (spec.head_dim + spec.value_width) if spec else 0,
            window=window,
            stride=compress.every if compress else 0 if spec is None or (window and not indexes) else 1,
            top_k=indexes[0].top_k * per_entry if indexes else None,
            index_width=own.head_dim if own else 0,
            index_work=own.num_heads * own.head_dim if own else 0,
            state=sum(math.prod(each.state_shape) for each in self.state_specs),
            stored=bool(specs) or spec is None,
            splits=spec.num_kv_heads if spec else max(map(_num_groups, self.state_specs), default=1),
            pool_width=sum(map(_pool_width, specs)),
        )


def _pool_width(spec: KVSpec) -> int:
    """Elements per position."""
    return spec.num_kv_heads * (spec.head_dim + (0 if spec.latent else spec.value_width))


def _num_groups(spec: StateSpec) -> int:
    """Parts of a state that tensor-parallel devices can hold separately."""
    if isinstance(spec, ConvSpec):
        return 1
    return spec.num_key_heads if isinstance(spec, DeltaSpec) else spec.num_groups


class Mixer:
    """The part of a layer that mixes positions: attention or a recurrence."""

    config: MixerConfig

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        return self.config.kv_specs

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return self.config.state_specs

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        """[R, in] -> [R, H]. `pool`: its only pool, or a tuple of KV pools, state pools, pool of `source_layer`."""
        raise NotImplementedError


class FeedForward(Protocol):
    """The part of a layer that computes each row by itself: an MLP or a mixture of experts."""

    def __call__(self, ops: Ops, x: Buffer, token_ids: Buffer = None) -> Buffer:
        """[R, H] -> [R, H]. Experts that token ids name need `token_ids` [R]."""


class FeedForwardConfig(Protocol):
    """Describes a feed-forward part."""

    @property
    def num_kernels(self) -> int:
        """See MixerConfig.num_kernels."""

    def routed_experts(self, hidden: int) -> RoutedExperts:
        """Sizes of the part's experts; NO_EXPERTS for an MLP."""

    def build(self, weights: Weights, prefix: str, hidden: int) -> FeedForward:
        """Builds it from the tensors under `prefix` (no trailing dot)."""


@dataclass(frozen=True)
class EmptyMixer(MixerConfig, Mixer):
    """Mixer of a layer that has only a feed-forward part, which then reads the first norm."""

    num_kernels: ClassVar[int] = 0

    @property
    def config(self) -> MixerConfig:  # type: ignore[override]
        return self

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, in_features: int) -> Mixer:
        return self


@dataclass(frozen=True)
class EmptyFeedForward:
    """Feed-forward part of a layer that has only a mixer."""

    num_kernels: ClassVar[int] = 0

    def routed_experts(self, hidden: int) -> RoutedExperts:
        return NO_EXPERTS

    def build(self, weights: Weights, prefix: str, hidden: int) -> FeedForward:
        return self

    def __call__(self, ops: Ops, x: Buffer, token_ids: Buffer = None) -> Buffer:
        raise NotImplementedError
