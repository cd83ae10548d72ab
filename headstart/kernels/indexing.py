"""What an indexer is to a device: sizes of what it keeps and of what it chooses (see Ops.choose)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class IndexSpec:
    """A lightning indexer (DeepSeek-V3.2 report, section 2.1): queries of `num_heads` heads score the one key that it
    keeps of a position, and a row attends to the `top_k` positions that score highest. See Ops.choose."""

    num_heads: int
    head_dim: int
    top_k: int
    num_kv_heads: ClassVar[int] = 1
    value_width: ClassVar[int] = 0
    latent: ClassVar[bool] = False
    window: ClassVar[int] = 0
    chunk: ClassVar[int] = 0
    causal: ClassVar[bool] = False
    before: ClassVar[bool] = False
