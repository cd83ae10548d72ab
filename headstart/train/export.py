"""Writing the averaged weights as a head checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import headstart
from headstart.formats.quantized.int8 import encode
from headstart.heads.files import write_head
from headstart.heads.kind import HeadCheckpoint, head_kind


def export_head(path: Path, head: HeadCheckpoint, weights: Mapping[str, Tensor]) -> None:
    """Write `weights` (canonical names), with this version in the provenance: in bfloat16; in our own layout, whose
    files are read by drafts in int4, matrices in int8."""
    head = replace(head, training={"headstart_version": headstart.__version__, **head.training})
    arrays: dict[str, Any] = {name: _bits(tensor) for name, tensor in weights.items()}
    layout = head_kind(head.spec.kind).layout
    if layout is None or layout.write is None:
        for name in [name for name, tensor in weights.items() if tensor.ndim == 2 and len(tensor) > 1]:
            arrays |= encode(name, weights[name].detach().float().cpu().numpy())
    write_head(path, head, arrays)


def _bits(tensor: Tensor) -> tuple[NDArray[np.uint16], str]:
    raw: NDArray[np.int16] = tensor.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return raw.view(np.uint16), "BF16"
