"""Shapes of what recurrent layers keep of each sequence instead of keys and values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConvSpec:
    """A short causal convolution: each channel sums its last `width` inputs. State: the last width - 1 inputs."""

    channels: int
    width: int

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.width - 1, self.channels

    @property
    def row_width(self) -> int:
        """Columns of a kept row (see Ops.causal_conv)."""
        return self.channels


@dataclass(frozen=True)
class DeltaSpec:
    """Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024): one state matrix [key_dim, value_dim] per value head. Value head
    v reads key head v // (num_heads / num_key_heads), or v % num_key_heads where they are `tiled`."""

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    tiled: bool = False

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
        return self.channels + 2 * self.num_heads


@dataclass(frozen=True)
class ScanSpec:
    """Mamba2's selective scan (Dao, Gu 2024): one state matrix [state_dim, head_dim] per head. Head h reads B and C of
    group h // (num_heads / num_groups)."""

    num_groups: int
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


StateSpec = ConvSpec | DeltaSpec | ScanSpec
"""What a recurrent layer keeps per sequence instead of keys and values."""
