"""Attention and Mamba2 side by side over the same rows (Falcon-H1, TII 2025): y = a attention(r x) + m mamba2(x).

Canonical tensors: those of layers/attention.py and layers/mamba2.py, under the same layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from headstart.kernels.ops import AttentionSpec, Buffer, Ops, Pool
from headstart.kernels.states import StateSpec
from headstart.layers.attention import Attention, AttentionConfig
from headstart.layers.mamba2 import Mamba2, Mamba2Config
from headstart.layers.weights import Shapes, Weights


@dataclass(frozen=True, kw_only=True)
class ParallelMixersConfig:
    """Both mixers, and what is multiplied: the rows that attention reads (`attention_in`), and what each puts out."""

    attention: AttentionConfig
    mamba: Mamba2Config
    attention_in: float = 1.0
    attention_out: float = 1.0
    mamba_out: float = 1.0

    def build(self, weights: Weights, prefix: str, hidden: int, *, eps: float, reads: int) -> ParallelMixers:
        """Those of the layer `prefix`, which read as many columns as `reads`."""
        return ParallelMixers(
            attention=self.attention.build(weights, prefix, hidden, eps=eps, reads=reads),
            mamba=self.mamba.build(weights, prefix, hidden, eps=eps, reads=reads),
            config=self,
        )

    def shapes(self, prefix: str, hidden: int, *, reads: int) -> Shapes:
        """Names and shapes of what `build` takes."""
        parts = (self.attention, self.mamba)
        return {name: each for part in parts for name, each in part.shapes(prefix, hidden, reads=reads).items()}


@dataclass(frozen=True)
class ParallelMixers:
    """See the module."""

    attention: Attention
    mamba: Mamba2
    config: ParallelMixersConfig
    shares: None = None

    @property
    def kv_specs(self) -> tuple[AttentionSpec, ...]:
        return self.attention.kv_specs

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return self.mamba.state_specs

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        """`pool`: that of keys and values, then those of Mamba2; the first alone where whole texts are trained on."""
        kv, *states = pool if isinstance(pool, tuple) else (pool,)
        scanned = self.mamba(ops, x, positions, tuple(states) or None)
        attended = self.attention(ops, _scaled(ops, x, self.config.attention_in), positions, kv)
        return ops.add(_scaled(ops, attended, self.config.attention_out), _scaled(ops, scanned, self.config.mamba_out))


def _scaled(ops: Ops, x: Buffer, factor: float) -> Buffer:
    return x if factor == 1 else ops.scale(x, factor)
