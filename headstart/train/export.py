"""Writing the averaged weights as a head checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import headstart
from headstart.heads.files import write_head
from headstart.heads.kind import HeadCheckpoint


def export_head(path: Path, head: HeadCheckpoint, weights: Mapping[str, Tensor]) -> None:
    """Write `weights` (canonical names) in bfloat16, with this version in the provenance."""
    head = replace(head, training={"headstart_version": headstart.__version__, **head.training})
    write_head(path, head, {name: _bits(tensor) for name, tensor in weights.items()})


def _bits(tensor: Tensor) -> tuple[NDArray[np.uint16], str]:
    raw: NDArray[np.int16] = tensor.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return raw.view(np.uint16), "BF16"
