"""Writing the averaged weights as a head checkpoint, and fingerprints of the trunk it belongs to."""

from __future__ import annotations

import hashlib
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
from headstart.kernels.ops import RawTensor


def trunk_fingerprint(tensors: Mapping[str, RawTensor]) -> str:
    """Of the trunk, whatever its quantization: names, shapes, and the values of all norms (files keep them whole)."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        if len(tensor.shape) == 1:
            digest.update(np.ascontiguousarray(tensor.float32()).tobytes())
    return digest.hexdigest()[:32]


def weights_fingerprint(tensors: Mapping[str, RawTensor]) -> str:
    """Of these very weights, quantization included (hidden states depend on it): a few rows of every matrix too."""
    digest = hashlib.sha256(trunk_fingerprint(tensors).encode())
    for _, tensor in sorted(tensors.items()):
        if len(tensor.shape) == 2:
            rows = np.unique(np.linspace(0, tensor.shape[0] - 1, 3).astype(np.int64))
            digest.update(np.ascontiguousarray(tensor.take_rows(rows).float32()).tobytes())
    return digest.hexdigest()[:16]


def export_head(path: Path, head: HeadCheckpoint, weights: Mapping[str, Tensor]) -> None:
    """Write `weights` (canonical names) in bfloat16, with this version in the provenance."""
    head = replace(head, training={"headstart_version": headstart.__version__, **head.training})
    write_head(path, head, {name: _bits(tensor) for name, tensor in weights.items()})


def _bits(tensor: Tensor) -> tuple[NDArray[np.uint16], str]:
    raw: NDArray[np.int16] = tensor.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return raw.view(np.uint16), "BF16"
