"""`VisionConfig` and `VisionNetwork`: a transformer over the patches of an image, and mergers that make rows of the
trunk of its outputs.

The patches of a token are neighbours: tokens row by row, in a token its patches row by row. Canonical tensors under
`vision.`: `patch_embedding.{t}` [hidden, channels * patch^2] for each of `frames` equal frames, `position_embedding`
[num_positions, hidden], `layers.N`, and those of the mergers.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from headstart.core import Float32, Int32
from headstart.kernels.ops import Activation, AttentionSpec, Buffer, Ops, Pool, StepInputs
from headstart.layers.decoder import DecoderLayer, LayerConfig
from headstart.layers.linear import BOUNDS, Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.shapes import shapes_of
from headstart.layers.weights import Shapes, Weights

PREFIX = "vision."
CHANNELS = 3
NormKind = Literal["", "rms", "layer", "unweighted"]  # "": no norm; "unweighted": rms without a weight


@dataclass(frozen=True, kw_only=True)
class MergerConfig:
    """Projection of the patches of a token to one row of the trunk. Canonical tensors under its name: `patch_norm`,
    `shift` and `scale`, `norm`, `join`, `up` and `down`; `projection` for the last two if `inner` is 0."""

    name: str
    averaged: bool = False  # the mean of the patches is projected; False: all of them, side by side
    factor: float = 1.0  # multiplies the mean
    standardized: bool = False  # the mean m becomes (factor * m - shift) * scale
    patch_norm: NormKind = ""  # of each patch
    norm: NormKind = ""  # of the mean, or of the patches side by side
    joined: int = 0  # rows of `join`, a matrix over the patches side by side; 0: none
    inner: int = 0  # rows of `up`, with the activation after it
    activation: Activation = "gelu"
    bias: bool = True  # of `up` and `down`

    def _matrices(self, config: "VisionConfig") -> dict[str, tuple[tuple[int, int], bool]]:
        """Matrices by name: ((out, in), has a bias)."""
        width = config.merged_width(self)
        join = {"join": ((self.joined, width), False)} if self.joined else {}
        width = self.joined or width
        if not self.inner:
            return {**join, "projection": ((config.out, width), False)}
        return {**join, "up": ((self.inner, width), self.bias), "down": ((config.out, self.inner), self.bias)}

    def build(self, weights: Weights, config: "VisionConfig") -> "Merger":
        width = config.merged_width(self)

        def norm(name: str, kind: NormKind, size: int) -> RMSNorm | None:
            if kind == "unweighted":
                return weights.unweighted_norm(size, config.eps)
            is_layer = kind == "layer"
            full = f"{self.name}.{name}"
            return weights.norm(full, size, config.eps, centered=is_layer, biased=is_layer) if kind else None

        matrices = {
            part: weights.linear(f"{self.name}.{part}", *size, bias=has_bias)
            for part, (size, has_bias) in self._matrices(config).items()
        }
        patch_norm = norm("patch_norm", self.patch_norm, config.hidden_size)
        names = ("shift", "scale") if self.standardized else ()
        statistics = [weights.raw(f"{self.name}.{name}", (width,)).float32() for name in names]
        return Merger(self, patch_norm, norm("norm", self.norm, width), matrices, statistics)


@dataclass(frozen=True)
class Merger:
    """A merger on a backend."""

    config: MergerConfig
    patch_norm: RMSNorm | None
    norm: RMSNorm | None
    matrices: dict[str, Linear]
    statistics: list[Float32]  # `shift` and `scale` [hidden], if the mean is standardized

    def side_by_side(self, patches: Float32, count: int) -> Float32:
        """[P, hidden] -> [T, merged width], of `count` patches each."""
        groups = patches.reshape(len(patches) // count, count, -1)
        if self.config.averaged:
            mean = groups.mean(1, dtype=np.float64) * self.config.factor
            if self.statistics:
                shift, scale = self.statistics
                mean = (mean - shift) * scale
            return np.ascontiguousarray(mean, np.float32)
        return groups.reshape(len(groups), -1)

    def project(self, ops: Ops, step: StepInputs) -> dict[str, Buffer]:
        """[T, merged width] -> `out` [T, trunk's hidden size]."""
        x = self.norm(ops, step.hidden) if self.norm else step.hidden
        for name, matrix in self.matrices.items():
            x = matrix(ops, x)
            x = ops.activate(x, self.config.activation) if name == "up" else x
        return {"out": x}


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes and layers of a vision tower."""

    patch_size: int  # pixels in a row of a patch
    frames: int = 1  # copies of the image that the patch embedding reads, one matrix each
    patch_bias: bool = True
    patch_norm: Literal["", "rms"] = ""  # of the patches before the first layer, for towers without `positions`
    hidden_size: int
    positions: int = 0  # rows and columns of the learned position embedding, stretched to the image; 0: none
    axis_positions: int = 0  # rows of the learned embeddings of a patch's column, and as many of its row; 0: none
    clips: bool = False  # the matrices of the layers have bounds (see layers.linear.ClippedLinear)
    layers: tuple[LayerConfig, ...]
    window: int = 0  # tokens in a row of an attention window; 0: no windows
    whole: tuple[int, ...] = ()  # indices of layers without windows, whose patches attend to the whole image
    eps: float
    merge: int  # patches in a row and in a column of a token
    merger: MergerConfig  # of the last layer's output: replaces embeddings in the trunk's rows
    deep: tuple[tuple[int, MergerConfig], ...] = ()  # (layer, merger of its output), added to the trunk's first layers
    out: int  # the trunk's hidden size
    learned: tuple[str, ...] = ()  # rows of the trunk beside those of tokens (text/image_blocks.py), by name

    @property
    def spec(self) -> AttentionSpec:
        """Attention of all layers, which share one pool: a layer's keys are read before the next layer stores its."""
        spec = self.layers[0].mixer.attention_spec
        assert spec is not None
        return spec

    @property
    def patch_width(self) -> int:
        return CHANNELS * self.patch_size**2

    @property
    def num_positions(self) -> int:
        """Rows of the position embedding; with `axis_positions` those of columns first."""
        return self.positions**2 or 2 * self.axis_positions

    def merged_width(self, merger: MergerConfig) -> int:
        """Columns of a merger's input."""
        return self.hidden_size * (1 if merger.averaged else self.merge**2)

    @property
    def mergers(self) -> tuple[MergerConfig, ...]:
        """The last layer's merger first."""
        return (self.merger, *(each for _, each in self.deep))

    def shapes(self) -> Shapes:
        """Canonical names and shapes."""
        shapes = shapes_of(self.build)
        if self.clips:
            matrices = [name.removesuffix(".weight") for name in shapes if "_proj." in name]
            shapes |= {f"{name}.{bound}": (1,) for name in matrices for bound in BOUNDS}
        return shapes

    def build(self, weights: Weights) -> "VisionNetwork":
        hidden, size = self.hidden_size, (self.num_positions, self.hidden_size)
        return VisionNetwork(
            config=self,
            patch_embedding=[
                weights.linear(f"vision.patch_embedding.{t}", hidden, self.patch_width, bias=self.patch_bias and t == 0)
                for t in range(self.frames)
            ],
            patch_norm=weights.norm("vision.patch_norm", hidden, self.layers[0].eps) if self.patch_norm else None,
            positions=weights.raw("vision.position_embedding.weight", size).float32() if size[0] else None,
            layers=[each.build(weights, f"vision.layers.{i}", hidden) for i, each in enumerate(self.layers)],
            mergers=[each.build(weights, self) for each in self.mergers],
            learned=[weights.raw(f"vision.{name}", (self.out,)).float32()[None] for name in self.learned],
        )


@dataclass(frozen=True)
class Stage:
    """Layers first .. end - 1, after which a merger may read the patches."""

    first: int
    end: int
    is_windowed: bool  # patches see their window only
    merger: int | None  # index in VisionNetwork.mergers


@dataclass(frozen=True, kw_only=True)
class VisionNetwork:
    """A vision tower on a backend: `embed`, then each of `stages`, and the mergers between them."""

    config: VisionConfig
    patch_embedding: list[Linear]
    patch_norm: RMSNorm | None
    positions: Float32 | None  # [num_positions, hidden]
    layers: list[DecoderLayer]
    mergers: list[Merger]
    learned: list[Float32]  # [1, out] each

    @property
    def stages(self) -> list[Stage]:
        """Runs of layers of one kind, cut where a merger reads."""
        config, last = self.config, len(self.layers) - 1
        merged = {layer: number for number, (layer, _) in enumerate(config.deep, 1)} | {last: 0}
        windowed = [bool(config.window) and i not in config.whole for i in range(len(self.layers))]
        stages, first = list[Stage](), 0
        for i in range(len(self.layers)):
            if i in merged or windowed[i] != windowed[i + 1]:
                stages.append(Stage(first, i + 1, windowed[i], merged.get(i)))
                first = i + 1
        return stages

    def embed(self, ops: Ops, step: StepInputs) -> dict[str, Buffer]:
        """Patches [P, channels * patch^2] -> `out` [P, hidden]."""
        frames = [each(ops, step.hidden) for each in self.patch_embedding]
        x = frames[0]
        for frame in frames[1:]:
            x = ops.add(x, frame)
        return {"out": self.patch_norm(ops, x) if self.patch_norm else x}

    def run(self, ops: Ops, step: StepInputs, stage: Stage, pool: Pool) -> dict[str, Buffer]:
        """Patches [P, hidden] through the layers of a stage -> `out` [P, hidden], and `merged`, a merger's input."""
        delta, residual = None, step.hidden
        for layer in self.layers[stage.first : stage.end]:
            delta, residual = layer(ops, delta, residual, step.positions, pool)
        x = residual if delta is None else ops.add(delta, residual)
        norm = None if stage.merger is None else self.mergers[stage.merger].patch_norm
        return {"out": x} if norm is None else {"out": x, "merged": norm(ops, x)}

    def position_rows(self, places: Int32, grid: tuple[int, int]) -> Float32:
        """Position embeddings [P, hidden] of patches at `places` [P, 2] in a grid: the sum of those of the column and
        the row, or the learned square, stretched linearly with its corners at the grid's (transformers 5.24,
        vision_utils.py)."""
        assert self.positions is not None
        if self.config.axis_positions:
            return self.positions[places[:, 1]] + self.positions[self.config.axis_positions + places[:, 0]]
        side, found = self.config.positions, np.float32(0)
        at = [
            places[:, axis].astype(np.float32) * np.float32(side - 1) / np.float32(max(grid[axis] - 1, 1))
            for axis in (0, 1)
        ]
        low = [np.floor(each).astype(np.int64) for each in at]
        for down in (0, 1):
            for right in (0, 1):
                taps = [np.minimum(low[axis] + step, side - 1) for axis, step in enumerate((down, right))]
                weights = [1 - np.abs(at[axis] - low[axis] - step) for axis, step in enumerate((down, right))]
                rows = self.positions[taps[0] * side + taps[1]]
                found = found + rows * (weights[0] * weights[1]).astype(np.float32)[:, None]
        return np.asarray(found, np.float32)


def patch_places(grid: tuple[int, int], merge: int) -> Int32:
    """Row and column [P, 2] of each patch, in the order of this file. grid: rows and columns of tokens."""
    rows, columns = np.mgrid[0 : grid[0] * merge, 0 : grid[1] * merge]
    places = np.stack((rows, columns), -1).reshape(grid[0], merge, grid[1], merge, 2)
    return places.transpose(0, 2, 1, 3, 4).reshape(-1, 2).astype(np.int32)


def windows(grid: tuple[int, int], side: int) -> list[Int32]:
    """Tokens of each attention window, row by row; windows row by row. Those at the right and lower edge may be smaller
    than side * side."""
    numbers = np.arange(math.prod(grid), dtype=np.int32).reshape(grid)
    starts = ((row, column) for row in range(0, grid[0], side) for column in range(0, grid[1], side))
    return [numbers[row : row + side, column : column + side].reshape(-1) for row, column in starts]
