"""The shape of a model as far as speed and memory need it: matrices, cached elements and work by kind of layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Part = Literal["attention", "mlp", "experts", "lm_head", "embedding", "head"]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """One layer that mixes positions. Counts are elements and multiply-adds, of all heads together.

    A row reads the newest `window` positions and, of what lies before, one entry for every `stride` positions
    (0: none), the best `top` of them where a choice is made. A recurrent layer has `state` and no entries.
    """

    weights: int
    kernels: int
    width: int = 0  # cached elements of one entry
    work: int = 0  # multiply-adds of one row over one entry: scores and values
    window: int = 0
    stride: int = 1
    top: int | None = None
    index_width: int = 0  # cached elements of one entry that the choice reads
    index_work: int = 0  # multiply-adds of one row over one entry for the choice
    state: int = 0  # float32 elements, read and written for every sequence
    stored: bool = True  # False: entries are those of an earlier layer
    splits: int = 1  # tensor-parallel devices that the cache can be divided among

    def far(self, context: float) -> float:
        """Entries that stand for positions outside the window."""
        return context / self.stride if self.stride else 0.0

    def kept(self, context: float) -> float:
        """Cached elements of a sequence."""
        if not self.stored:
            return 0.0
        return min(context, self.window) * self.width + self.far(context) * (self.width + self.index_width)

    def entries(self, context: float) -> float:
        """Entries whose keys and values one row reads."""
        far = self.far(context)
        return min(context, self.window) + (far if self.top is None else min(far, self.top))

    def read(self, context: float, rows: float) -> float:
        """Cached elements that `rows` rows of one sequence read together. Rows that choose entries choose apart."""
        chosen = self.entries(context) * (1 if self.top is None else rows)
        entries = min(chosen, min(context, self.window) + self.far(context))
        return entries * self.width + self.far(context) * self.index_width

    def multiply_adds(self, context: float) -> float:
        """Of one row with its cached entries (and a recurrent layer's with its state, twice)."""
        return self.entries(context) * self.work + self.far(context) * self.index_work + 2 * self.state


@dataclass(frozen=True, kw_only=True)
class MLP:
    """One feed-forward layer: `weights` that every row needs (dense, shared experts, router), and routed experts."""

    weights: int
    kernels: int
    experts: int = 0
    active: int = 0
    expert_weights: int = 0

    def touched(self, rows: float) -> float:
        """Expected number of distinct experts that `rows` rows choose, each `active` of them at random."""
        return self.experts * (1 - (1 - self.active / self.experts) ** rows) if self.experts else 0.0


@dataclass(frozen=True)
class Layers:
    """Equal layers."""

    count: int
    attention: Attention
    mlp: MLP

    @property
    def weights(self) -> int:
        """Of all of them, every expert counted."""
        return self.count * (self.attention.weights + self.mlp.weights + self.mlp.experts * self.mlp.expert_weights)


@dataclass(frozen=True, kw_only=True)
class Head:
    """What drafts. One step makes one token: `layers` over `hidden` values, a projection before them, and `vocab` rows
    of an LM head (0: none, as in a look-up); `once`: one step makes the whole draft, a row for each token.

    `modules`: layers and projections stored, of which a step reads one. `per_token`: further weights that each drafted
    token reads, each its own; `again`: those that all of them read, which `own` counts. `own`: weights of its own
    embedding and LM heads. `most`: its deepest draft (None: any). `assumed`: the model comes without one; this is what
    one of that kind would be.
    """

    kind: str
    hidden: int
    vocab: int
    layers: tuple[Layers, ...] = ()
    projection: int = 0
    modules: int = 1
    per_token: int = 0
    again: int = 0
    own: int = 0
    once: bool = False
    most: int | None = None
    assumed: bool = False
    source: str = ""

    @property
    def parameters(self) -> int:
        """Stored, without an LM head that is the trunk's."""
        stored = sum(group.weights for group in self.layers) + self.projection
        return self.modules * stored + (self.most or 0) * self.per_token + self.own

    @property
    def drafts(self) -> bool:
        return self.vocab > 0 or self.most != 0


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model. `notes`: what was assumed about it. `acceptance`: expected tokens per step by depth, from its source."""

    name: str
    hidden: int
    vocab: int
    tied: bool
    layers: tuple[Layers, ...]
    head: Head
    weights: str  # name of the weight format it comes in
    max_length: int | None = None
    looked_up: int = 0  # weights of further embeddings, of which a token reads its own row only
    bytes_per_weight: dict[Part, float] = field(default_factory=dict)  # measured in a checkpoint; wins over the format
    acceptance: tuple[float, ...] = ()
    acceptance_source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return sum(group.count for group in self.layers)

    def parameters(self) -> dict[Part, int]:
        """Weights by part; `head` without the LM head that it shares."""
        return {
            "attention": sum(group.count * group.attention.weights for group in self.layers),
            "mlp": sum(group.count * group.mlp.weights for group in self.layers),
            "experts": sum(group.count * group.mlp.experts * group.mlp.expert_weights for group in self.layers),
            "lm_head": self.vocab * self.hidden,
            "embedding": self.looked_up + (0 if self.tied else self.vocab * self.hidden),
            "head": self.head.parameters,
        }

    def active(self) -> int:
        """Weights that one token runs through, of the trunk, LM head included and embedding not."""
        counts = self.parameters()
        chosen = sum(group.count * group.mlp.active * group.mlp.expert_weights for group in self.layers)
        return counts["attention"] + counts["mlp"] + counts["lm_head"] + chosen

    def noted(self, *notes: str) -> Shape:
        return replace(self, notes=(*self.notes, *notes))
