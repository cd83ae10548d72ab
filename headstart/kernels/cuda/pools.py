"""What a pass leaves for later ones, on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class KVPool:
    """Keys [slots, heads, D] and values [slots, heads, V]; latent values are a view of the keys."""

    keys: Tensor
    values: Tensor
    latent: bool = False


@dataclass(frozen=True, eq=False)
class StatePool:
    """`states` [slots, ...] and `rows` [owned, kept, W] of recurrent layers (see Backend.state_pool)."""

    states: Tensor
    rows: Tensor
