"""MLPs, gated (SwiGLU, Shazeer 2020, and other activations) or not; sparse activations of Gemma 3n."""

from dataclasses import dataclass
from typing import ClassVar

from headstart.kernels.ops import Activation, Buffer, Ops, Weight
from headstart.kernels.specs import StreamSpec
from headstart.layers.costs import NO_EXPERTS, RoutedExperts
from headstart.layers.linear import Linear, scale
from headstart.layers.norm import RMSNorm
from headstart.layers.weights import Weights

TINY = 1e-15  # added to the mean square, so that rows of zeros stay zeros
ONE_STREAM = StreamSpec(1, 0, 0.0)


@dataclass(frozen=True)
class Magnitude:
    """Splits rows into direction and rms."""

    norm: RMSNorm  # with a weight of ones [W]
    mean: Linear  # [1, W], 1 / W each

    def split(self, ops: Ops, x: Buffer) -> tuple[Buffer, Buffer]:
        """[R, W] -> (x / rms(x) [R, W], rms(x) [R, 1]): rms(x) is the mean of x * (x / rms(x))."""
        direction = self.norm(ops, x)
        return direction, self.mean(ops, ops.activate_mul(x, direction, "identity"))

    def rescale(self, ops: Ops, x: Buffer, lengths: Buffer) -> Buffer:
        """x [R, W] with other lengths [R, 1]."""
        return scale_rows(ops, self.norm(ops, x), lengths)


def scale_rows(ops: Ops, x: Buffer, factors: Buffer) -> Buffer:
    """x [R, W] times factors [R, 1]."""
    return ops.sum_streams(x, factors, ONE_STREAM)


def build_magnitude(weights: Weights, width: int) -> Magnitude:
    """The Magnitude of rows [R, width]."""
    mean = weights.filled(1 / width, 1, width)
    return Magnitude(weights.unweighted_norm(width, TINY), Linear(mean))


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """An MLP. Canonical tensors under its prefix: gate_proj (if `gated`), up_proj, down_proj."""

    inner: int  # intermediate size
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False  # of all matrices
    gate_scale: float = 1.0  # multiplies the input of a gated MLP's activation
    output_scale: float = 1.0  # multiplies the output of a gated MLP
    cutoff: float | None = None  # standard deviations of GaussianTopK; None: dense activations
    num_kernels: ClassVar[int] = 4

    def routed_experts(self, hidden: int) -> RoutedExperts:
        return NO_EXPERTS

    def build(self, weights: Weights, prefix: str, hidden: int) -> "GatedMLP | MLP":
        """See FeedForwardConfig.build."""
        names = ("gate_proj", "up_proj") if self.gated else ("up_proj",)
        sizes = {**dict.fromkeys(names, (self.inner, hidden)), "down_proj": (hidden, self.inner)}
        parts = weights.linears(prefix, sizes, bias=self.bias)
        if self.gated:
            gate, up, down = parts["gate_proj"], parts["up_proj"], parts["down_proj"]
            topk = None
            if self.cutoff is not None:
                topk = GaussianTopK(build_magnitude(weights, self.inner), weights.filled(-self.cutoff, self.inner))
            return GatedMLP(gate, up, down, self.activation, self.gate_scale, self.output_scale, topk)
        return MLP(parts["up_proj"], parts["down_proj"], self.activation)


@dataclass(frozen=True)
class GaussianTopK:
    """max(x - mean(x) - cutoff std(x), 0) by row, mostly zeros."""

    magnitude: Magnitude
    threshold: Weight  # -cutoff [W]

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        direction, deviation = self.magnitude.split(ops, ops.center(x))
        clipped = ops.activate(ops.add_bias(direction, self.threshold), "relu")
        return scale_rows(ops, clipped, deviation)


@dataclass(frozen=True)
class GatedMLP:
    """down(activation(gate(x)) * up(x)), with two factors and optional sparse activations."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    activation: Activation
    gate_scale: float = 1.0
    output_scale: float = 1.0
    topk: GaussianTopK | None = None

    def __call__(self, ops: Ops, x: Buffer, token_ids: Buffer = None) -> Buffer:
        gate, up = self.gate_proj(ops, x), self.up_proj(ops, x)
        gate = scale(ops, gate, self.gate_scale)
        gate = self.topk(ops, gate) if self.topk else gate
        return scale(ops, self.down_proj(ops, ops.activate_mul(gate, up, self.activation)), self.output_scale)


@dataclass(frozen=True)
class MLP:
    """down(activation(up(x)))."""

    up_proj: Linear
    down_proj: Linear
    activation: Activation

    def __call__(self, ops: Ops, x: Buffer, token_ids: Buffer = None) -> Buffer:
        return self.down_proj(ops, ops.activate(self.up_proj(ops, x), self.activation))
