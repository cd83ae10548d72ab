"""Shapes and options of single ops (see kernels/ops.py)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: dims i and i + rotary_dim / 2 rotate by position * inv_freq[i] (half-split layout of HF)."""

    inv_freq: tuple[float, ...]  # rotary_dim / 2 frequencies
    rotary_dim: int  # the dims beyond it are not rotated
    scale: float = 1.0  # multiplies sin and cos (YaRN)
    trailing: bool = False  # the last rotary_dim dims rotate instead, neighbours 2 i and 2 i + 1 together
    inverse: bool = False  # rotate backwards
    shift: int = 0  # rotate by position - shift, at least 0
    # column of StepPlan.rope_positions that each frequency takes (M-RoPE); empty: the row's position
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class AttentionTemperature:
    """Queries times 1 + strength * ln(1 + floor((position + ahead) / every)) (Llama 4)."""

    every: int
    strength: float
    ahead: int = 0


@dataclass(frozen=True)
class StreamSpec:
    """Hyper-connections: several residual streams with a doubly stochastic mixing matrix (see Ops.stream_weights)."""

    count: int  # streams
    iterations: int  # Sinkhorn iterations
    eps: float  # keeps sums away from 0
    magnitude: float = 2.0  # the largest weight of the output
    mixed: bool = True  # False: no mixing matrix, each stream keeps itself
    weighted_end: bool = True  # the final sum has weights; False: the mean
    gate_rank: int = 0  # rank of the gates of every feature (layers/streams.py: GatedStreams); 0: a weight per stream
    softmax: bool = False  # the weights of a sum alone are a softmax (attention residuals)
    delayed: bool = False  # a part's input is summed by the weights that the part before it computed

    @property
    def num_mixes(self) -> int:
        """Weights of one mixing: of the input, of the output, and the matrix."""
        return (2 + (self.count if self.mixed else 0)) * self.count

    @property
    def num_scales(self) -> int:
        """Parts of these weights, each with a scale."""
        return 3 if self.mixed else 2


@dataclass(frozen=True)
class NGramSpec:
    """Hashes of a row's last tokens (see Ops.embed_ngrams)."""

    factors: tuple[int, ...]  # by distance from the row, below 2^63 / vocabulary; as many as the longest n-gram has
    sizes: tuple[int, ...]  # rows of the table for each hash: those of 2-grams, of 3-grams, ...
    end: int  # token that stands for those before the text
    cuts: bool = True  # tokens before an `end` inside the text are not read either

    @property
    def longest(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.factors)

    def rows(self, last: Any) -> list[Any]:
        """Rows of the table for each hash, int64 [...]. last: see Ops.embed_ngrams; int64 [..., longest], of numpy or
        torch."""
        found: list[Any] = []
        each, first, mixed = len(self.sizes) // (self.longest - 1), 0, 0
        ended: Any = False  # an image, or an end: tokens before are not read
        for i, factor in enumerate(self.factors):
            ended = ended | (last[..., i] < 0)
            missing = (ended | (last[..., i] == 0)) * 1
            token = (last[..., i] - 1) * (1 - missing) + self.end * missing
            ended = ended | (token == self.end) if i and self.cuts else ended
            mixed = mixed ^ (token * factor)
            for size in self.sizes[(i - 1) * each : i * each] if i else ():
                found.append(first + mixed % size)
                first += size
        return found


@dataclass(frozen=True)
class RouterSpec:
    """How a mixture of experts chooses and weighs experts (DeepSeek-V3 report, section 2.1.2). Ties: the lower id."""

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid", "softplus"] = "softmax"  # of the logits; softplus: sqrt(ln(1 + e^logit))
    normalize: bool = True  # divide the chosen scores by their sum
    scale: float = 1.0  # multiplies the weights
    num_groups: int = 1  # groups of neighbouring experts
    top_groups: int = 1  # groups that take part: those whose two best scores (with bias) sum highest
    num_identity: int = 0  # the last experts have no matrices and return their input
    scales_inputs: bool = False  # weights multiply the experts' inputs instead of their outputs (Llama 4)

    @property
    def num_matrices(self) -> int:
        """Experts that have matrices."""
        return self.num_experts - self.num_identity


@dataclass(frozen=True)
class ConvSpec:
    """A depthwise causal convolution over the last `width` inputs. State: the last width - 1 inputs."""

    channels: int
    width: int

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.width - 1, self.channels

    @property
    def row_width(self) -> int:
        """Columns of a kept row: the inputs."""
        return self.channels


@dataclass(frozen=True)
class DeltaSpec:
    """Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024): one state matrix [key_dim, value_dim] per value head."""

    num_key_heads: int
    num_heads: int  # value heads
    key_dim: int
    value_dim: int
    tiled: bool = False  # value head v reads key head v % num_key_heads, else v // (num_heads / num_key_heads)
    by_channel: bool = False  # a decay for each key feature (Kimi delta attention), else one for each head

    @property
    def num_decays(self) -> int:
        """Width of the log decays."""
        return self.num_heads * (self.key_dim if self.by_channel else 1)

    @property
    def channels(self) -> int:
        """Width of [q, k, v]."""
        return 2 * self.num_key_heads * self.key_dim + self.num_heads * self.value_dim

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.key_dim, self.value_dim

    @property
    def row_width(self) -> int:
        """Columns of a kept row: [q, k, v], log decay, strength."""
        return self.channels + self.num_decays + self.num_heads


@dataclass(frozen=True)
class ScanSpec:
    """Mamba2's selective scan (Dao, Gu 2024): one state matrix [state_dim, head_dim] per head."""

    num_groups: int  # head h reads B and C of group h // (num_heads / num_groups)
    num_heads: int
    state_dim: int
    head_dim: int

    @property
    def inner(self) -> int:
        """Width of x."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Width of [x, B, C]."""
        return self.inner + 2 * self.num_groups * self.state_dim

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.num_heads, self.state_dim, self.head_dim

    @property
    def row_width(self) -> int:
        """Columns of a kept row: [x, B, C], step."""
        return self.channels + self.num_heads


StateSpec = ConvSpec | DeltaSpec | ScanSpec  # state of a recurrent layer, one per sequence


class _OneKeyHead:
    """Attributes of an AttentionSpec with one key head per position, no values and no mask of its own."""

    num_kv_heads: ClassVar[int] = 1
    value_width: ClassVar[int] = 0
    latent: ClassVar[bool] = False
    window: ClassVar[int] = 0
    block_window: ClassVar[bool] = False
    chunk: ClassVar[int] = 0
    excludes_self: ClassVar[bool] = False


@dataclass(frozen=True)
class CandidateSpec:
    """Blocks of keys that several indexers of one top_k share (DeepSeek-V4.1; see Ops.select_positions)."""

    count: int  # blocks that the source keeps
    size: int  # keys of a block
    source: bool  # this indexer keeps the blocks; False: it selects within those that were kept last


@dataclass(frozen=True)
class IndexSpec(_OneKeyHead):
    """A lightning indexer (DeepSeek-V3.2 report, section 2.1; see Ops.select_positions), or one that selects blocks
    for each KV head (MiniMax-M3; see Ops.select_blocks)."""

    num_heads: int  # query heads, which share one key per position
    head_dim: int
    top_k: int  # positions, windows or blocks that a row attends to
    every: int = 1  # only positions that end a window of this size can be selected
    whole: bool = False  # all positions of the selected windows, and those after the last whole window
    local: bool = False  # with `whole`: the row's own window always, and top_k windows before it
    groups: int = 1  # selections, each by equally many heads, for equally many KV heads
    causal: bool = False  # positions after the row's own are no candidates; for single positions
    candidates: CandidateSpec | None = None  # None: all keys up to the row can be selected


@dataclass(frozen=True)
class CompressSpec(_OneKeyHead):
    """Compressed KV entries, one per window (DeepSeek-V4 report, section 2.3; see Ops.compress)."""

    every: int  # positions of a window
    dim: int  # features of an entry
    overlap: bool = False  # an entry covers two windows, each with its own part of the projections
    causal: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """Columns of a projection."""
        return self.dim * (2 if self.overlap else 1)

    @property
    def head_dim(self) -> int:
        """Columns of a stored row: values and gates."""
        return 2 * self.width

    @property
    def span(self) -> int:
        """Positions that an entry covers."""
        return self.every * (2 if self.overlap else 1)
