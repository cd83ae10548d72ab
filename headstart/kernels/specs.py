"""What single operations are told of themselves (see kernels/ops.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding, half-split (HF) layout: dims i and i + rotary_dim / 2 turn by position * inv_freq[i] * 1;
    sin and cos are multiplied by `scale` (YaRN). dims beyond rotary_dim pass through. `trailing`: the last rotary_dim
    dims turn, neighbours 2 i and 2 i + 1 together. `inverse`: they turn back. `behind`: by a position that lies so far
    before the row's (not before 0)."""

    inv_freq: tuple[float, ...]
    rotary_dim: int
    scale: float = 1.0
    trailing: bool = False
    inverse: bool = False
    behind: int = 0


@dataclass(frozen=True)
class TemperSpec:
    """Queries that grow with the text: times 1 + strength * ln(1 + floor((position + ahead) / every))."""

    every: int
    strength: float
    ahead: int = 0


@dataclass(frozen=True)
class StreamSpec:
    """Hyper-connections: `count` residual streams, whose mixing matrix is made doubly stochastic in so many
    `iterations`; `eps` keeps its sums away from 0. See Ops.stream_weights."""

    count: int
    iterations: int
    eps: float

    @property
    def num_mixes(self) -> int:
        """Weights of one part: of its input, of its output, and the mixing matrix."""
        return (2 + self.count) * self.count


@dataclass(frozen=True)
class RouterSpec:
    """Which experts a row takes and how it weighs them.

    Scores are the softmax or sigmoid of the router's logits, or sqrt(ln(1 + e^logit)) (`softplus`); a bias is added for
    the choice only. Of groups of neighbouring experts, those `top_groups` take part whose two best choices sum highest
    (DeepSeek-V3 report, section 2.1.2). The scores of the `top_k` chosen, divided by their sum if `normalize`, times
    `scale`, are the weights: of what experts say, or if `scales_inputs` of what they read (Llama 4). Ties go to the
    lowest id. The last `num_identity` experts have no matrices: they give back the row.
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid", "softplus"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    num_identity: int = 0
    scales_inputs: bool = False

    @property
    def num_matrices(self) -> int:
        """Experts that have matrices."""
        return self.num_experts - self.num_identity
