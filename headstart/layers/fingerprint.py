"""Names for weights: what was made for one model must not be used with another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

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
