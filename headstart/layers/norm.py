"""Norms: RMSNorm (Zhang, Sennrich 2019), LayerNorm (Ba, Kiros, Hinton 2016), and none."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from headstart.kernels.ops import Buffer, Ops, Weight


class Norm(ABC):
    """A norm before or after a part of a layer."""

    @abstractmethod
    def __call__(self, ops: Ops, x: Buffer) -> Buffer: ...

    def add(self, ops: Ops, x: Buffer | None, residual: Buffer) -> tuple[Buffer, Buffer]:
        """Returns (norm(x + residual), x + residual); x None: 0."""
        stream = residual if x is None else ops.add(x, residual)
        return self(ops, stream), stream


@dataclass(frozen=True)
class NoNorm(Norm):
    """y = x, for a place without a norm."""

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        return x


@dataclass(frozen=True)
class RMSNorm(Norm):
    """y = x / sqrt(mean(x^2) + eps) * weight. Families with (1 + w) norms add 1 when they load the weight."""

    weight: Weight
    eps: float

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, ops: Ops, x: Buffer | None, residual: Buffer) -> tuple[Buffer, Buffer]:
        if x is None:
            return self(ops, residual), residual
        return ops.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True)
class Unnormed(RMSNorm):
    """y = x, in place of a final norm. `weight`: ones."""

    add = Norm.add

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        return x


@dataclass(frozen=True)
class GroupedRMSNorm(RMSNorm):
    """RMSNorm of groups of features, each with its own part of the weight."""

    num_groups: int = 1
    add = Norm.add  # without the fused kernel, which has no groups

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        return ops.rms_norm(x, self.weight, self.eps, self.num_groups)


@dataclass(frozen=True)
class LayerNorm(RMSNorm):
    """RMSNorm of x - mean(x), plus a bias."""

    bias: Weight | None = None
    add = Norm.add

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        normed = ops.rms_norm(ops.center(x), self.weight, self.eps)
        return normed if self.bias is None else ops.add_bias(normed, self.bias)
