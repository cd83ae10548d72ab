"""What indexers and compressors are to a device: sizes of what they keep and choose (see Ops.choose, Ops.compress)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class IndexSpec:
    """A lightning indexer (DeepSeek-V3.2 report, section 2.1): queries of `num_heads` heads score the one key that it
    keeps of a position, and a row attends to the `top_k` positions that score highest, of those that end a window of
    `every`. See Ops.choose."""

    num_heads: int
    head_dim: int
    top_k: int
    every: int = 1
    num_kv_heads: ClassVar[int] = 1
    value_width: ClassVar[int] = 0
    latent: ClassVar[bool] = False
    window: ClassVar[int] = 0
    chunk: ClassVar[int] = 0
    causal: ClassVar[bool] = False
    before: ClassVar[bool] = False


@dataclass(frozen=True)
class CompressSpec:
    """Entries of `dim` features for windows of `every` positions (DeepSeek-V4 report, section 2.3). `overlap`: of twice
    as many positions; projections then have two parts, of which the window before gives the first. See Ops.compress."""

    every: int
    dim: int
    overlap: bool = False
    num_kv_heads: ClassVar[int] = 1
    value_width: ClassVar[int] = 0
    latent: ClassVar[bool] = False
    window: ClassVar[int] = 0
    chunk: ClassVar[int] = 0
    causal: ClassVar[bool] = False
    before: ClassVar[bool] = False

    @property
    def width(self) -> int:
        """Columns of a projection."""
        return self.dim * (2 if self.overlap else 1)

    @property
    def head_dim(self) -> int:
        """Columns of a kept row: projection and gates."""
        return 2 * self.width

    @property
    def span(self) -> int:
        """Positions that an entry is made of."""
        return self.every * (2 if self.overlap else 1)
