"""`VisionConfig` and `VisionNetwork`: a transformer over the patches of a picture, and the projection of its outputs to
rows of the trunk.

Canonical tensors under `vision.`: `patch_embedding` [hidden, channels * patch^2], `position_embedding` [P, hidden],
`layers.N`, `norm`, `project_norm`, `projection` [trunk's hidden size, hidden].
"""

from dataclasses import dataclass

import numpy as np

from headstart.core import Float32
from headstart.kernels.ops import AttentionSpec, Buffer, Ops, Pool, StepInputs, Weight
from headstart.layers.decoder import DecoderLayer, LayerConfig
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.weights import Shapes, Weights

PREFIX = "vision."
CHANNELS = 3


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes and layers of a vision tower for pictures of one size."""

    grid: int  # patches in a row and in a column
    patch_size: int  # pixels in a row of a patch
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    eps: float
    pool: int  # patches in a row and in a column of which the mean is one token
    out: int  # the trunk's hidden size

    @property
    def num_patches(self) -> int:
        return self.grid**2

    @property
    def num_tokens(self) -> int:
        return (self.grid // self.pool) ** 2

    @property
    def spec(self) -> AttentionSpec:
        """Attention of all layers, which share one pool: a layer's keys are read before the next layer stores its."""
        spec = self.layers[0].mixer.attention_spec
        assert spec is not None
        return spec

    def shapes(self) -> Shapes:
        """Canonical names and shapes."""
        hidden = self.hidden_size
        shapes: Shapes = {
            "vision.patch_embedding.weight": (hidden, CHANNELS * self.patch_size**2),
            "vision.patch_embedding.bias": (hidden,),
            "vision.position_embedding.weight": (self.num_patches, hidden),
        }
        for i, layer in enumerate(self.layers):
            shapes |= layer.shapes(f"vision.layers.{i}", hidden)
        ends: Shapes = {"vision.norm.weight": (hidden,), "vision.norm.bias": (hidden,)}
        return shapes | ends | {"vision.project_norm.weight": (hidden,), "vision.projection.weight": (self.out, hidden)}

    def build(self, weights: Weights) -> "VisionNetwork":
        hidden = self.hidden_size
        return VisionNetwork(
            config=self,
            patch_embedding=weights.linear("vision.patch_embedding", hidden, CHANNELS * self.patch_size**2, bias=True),
            position_embedding=weights.get("vision.position_embedding.weight", self.num_patches, hidden),
            layers=[each.build(weights, f"vision.layers.{i}", hidden) for i, each in enumerate(self.layers)],
            norm=weights.norm("vision.norm", hidden, self.eps, centered=True, biased=True),
            project_norm=weights.norm("vision.project_norm", hidden, self.eps),
            projection=weights.linear("vision.projection", self.out, hidden),
        )


@dataclass(frozen=True, kw_only=True)
class VisionNetwork:
    """A vision tower on a backend. `encode`, `pooled` and `project` in turn make the rows of a picture."""

    config: VisionConfig
    patch_embedding: Linear
    position_embedding: Weight
    layers: list[DecoderLayer]
    norm: RMSNorm
    project_norm: RMSNorm
    projection: Linear

    def encode(self, ops: Ops, step: StepInputs, pool: Pool) -> dict[str, Buffer]:
        """Patches [P, channels * patch^2] with their numbers as token ids -> `out` [P, hidden]."""
        x = self.patch_embedding(ops, step.hidden)
        residual = ops.add(x, ops.embed(self.position_embedding, step.token_ids))
        delta = None
        for layer in self.layers:
            delta, residual = layer(ops, delta, residual, step.positions, pool)
        return {"out": self.norm.add(ops, delta, residual)[0]}

    def pooled(self, encoded: Float32) -> Float32:
        """Means of squares of pool * pool patches [P, hidden] -> [T, hidden]."""
        config, side = self.config, self.config.grid // self.config.pool
        squares = encoded.reshape(side, config.pool, side, config.pool, -1)
        return np.ascontiguousarray(squares.mean((1, 3), dtype=np.float64).reshape(side * side, -1), np.float32)

    def project(self, ops: Ops, step: StepInputs) -> dict[str, Buffer]:
        """[T, hidden] -> `out` [T, trunk's hidden size]."""
        return {"out": self.projection(ops, self.project_norm(ops, step.hidden))}
