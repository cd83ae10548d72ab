"""Costs of layers: weights, cache, recurrent state, multiply-adds and kernel launches.

Weights follow from the shapes of a layer's tensors; cache and attention work follow from its mixer's cache specs.
Units are elements and multiply-adds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

TABLES = ("embed_tokens.weight", "embed_tokens_per_layer.weight", ".table")
"""Name endings of tables, of which a token reads one row."""


@dataclass(frozen=True, kw_only=True)
class MixerCost:
    """Attention or a recurrence of one layer, all heads together.

    A row reads the newest `window` positions. Of the positions before them it reads one entry per `stride`, or the
    `top_k` best of these entries. A recurrence has `state` and no entries.
    """

    weights: int
    num_kernels: int  # launches per layer, fused where engines usually fuse
    kv_width: int = 0  # cached elements per entry: keys and values
    entry_work: int = 0  # multiply-adds per row and entry: scores and values
    window: int = 0  # positions
    stride: int = 1  # positions per entry before the window; 0: no entries there
    top_k: int | None = None  # entries that an indexer selects per row; None: no indexer
    index_width: int = 0  # cached indexer elements per entry
    index_work: int = 0  # indexer multiply-adds per row and entry
    state: int = 0  # float32 elements per sequence; each pass reads and writes them
    stored: bool = True  # False: keys and values are those of an earlier layer
    entries_stored: bool = True  # False: entries before the window, and index keys, are those of an earlier layer
    splits: int = 1  # most tensor-parallel devices that divide cache or state
    pool_width: int = 0  # elements per position in this engine's pools

    def entries_before_window(self, context: float) -> float:
        """Entries for positions before the window."""
        return context / self.stride if self.stride else 0.0

    def cached(self, context: float) -> float:
        """Cached elements of a sequence of `context` positions."""
        if not self.stored:
            return 0.0
        entries = self.entries_before_window(context) if self.entries_stored else 0.0
        return min(context, self.window) * self.kv_width + entries * (self.kv_width + self.index_width)

    def entries(self, context: float) -> float:
        """Entries whose keys and values one row reads."""
        far = self.entries_before_window(context)
        return min(context, self.window) + (far if self.top_k is None else min(far, self.top_k))

    def read(self, context: float, rows: float) -> float:
        """Cached elements that `rows` rows of one sequence read together. An indexer selects entries per row."""
        selected = self.entries(context) * (1 if self.top_k is None else rows)
        entries = min(selected, min(context, self.window) + self.entries_before_window(context))
        return entries * self.kv_width + self.entries_before_window(context) * self.index_width

    def multiply_adds(self, context: float) -> float:
        """Multiply-adds of one row over cached entries, and twice over the recurrent state."""
        indexed = self.entries_before_window(context)
        return self.entries(context) * self.entry_work + indexed * self.index_work + 2 * self.state


@dataclass(frozen=True, kw_only=True)
class RoutedExperts:
    """Routed experts of one layer."""

    count: int
    active: int  # per row
    weights: int  # per expert


NO_EXPERTS = RoutedExperts(count=0, active=0, weights=0)


@dataclass(frozen=True, kw_only=True)
class FeedForwardCost:
    """Everything of one layer but its mixer."""

    weights: int  # that every row reads: MLP, shared experts, router, norms
    num_kernels: int
    experts: int = 0
    active: int = 0  # experts per row
    expert_weights: int = 0  # per expert
    tables: int = 0  # weights of tables, of which a token reads one row

    def touched(self, rows: float) -> float:
        """Expected number of distinct experts of `rows` rows that each draw `active` at random."""
        return self.experts * (1 - (1 - self.active / self.experts) ** rows) if self.experts else 0.0


@dataclass(frozen=True)
class LayerCost:
    """One layer."""

    mixer: MixerCost
    feed_forward: FeedForwardCost

    @property
    def weights(self) -> int:
        """All weights, experts included."""
        feed = self.feed_forward
        return self.mixer.weights + feed.weights + feed.experts * feed.expert_weights + feed.tables

    @property
    def active_weights(self) -> int:
        """Weights that multiply one row. A row's operations are twice as many, plus those of attention."""
        feed = self.feed_forward
        return self.mixer.weights + feed.weights + feed.active * feed.expert_weights

    @property
    def num_kernels(self) -> int:
        return self.mixer.num_kernels + self.feed_forward.num_kernels


@dataclass(frozen=True, kw_only=True)
class DecoderCost:
    """A trunk."""

    layers: tuple[LayerCost, ...]
    embedding: int  # weights of tables outside layers; 0 for an embedding that is the LM head too
    lm_head: int  # weights
    outer: int  # weights of the final norm and of what several layers share


def num_elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def num_table_elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return num_elements({name: shape for name, shape in shapes.items() if name.endswith(TABLES)})
