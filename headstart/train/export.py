"""Writing the averaged weights as a head checkpoint, and fingerprints of the trunk it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import headstart
from headstart.formats.head import BlockConfig, HeadConfig, write_head
from headstart.kernels.ops import AttentionSpec, RawTensor, RopeSpec
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.mtp import HeadSpec


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


def export_head(
    path: Path,
    weights: Mapping[str, Tensor],
    draft_token_ids: NDArray[np.int64],
    kind: str,
    spec: HeadSpec,
    config: DecoderConfig,
    about: Mapping[str, Any],
) -> None:
    """Write `weights` (canonical names) in bfloat16. `about`: trunk, trunk_fingerprint, training."""
    block = _block(config)
    head = HeadConfig(
        kind=kind,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        block=block,
        trunk=about["trunk"],
        trunk_fingerprint=about["trunk_fingerprint"],
        training={"headstart_version": headstart.__version__, **about["training"]},
        **{each.name: getattr(spec, each.name) for each in fields(HeadSpec)},
    )
    write_head(path, head, {name: _bits(tensor) for name, tensor in weights.items()}, draft_token_ids)


def _block(config: DecoderConfig) -> BlockConfig:
    layer = config.head_layer
    mixer, mlp = layer.mixer, layer.mlp
    if isinstance(mixer, AttentionConfig) and isinstance(mlp, MLPConfig) and mixer.rope:
        return BlockConfig(
            intermediate_size=mlp.inner,
            attention=mixer.spec,
            rope=mixer.rope,
            eps=layer.eps,
            qkv_bias=mixer.qkv_bias,
            o_bias=mixer.o_bias,
            mlp_bias=mlp.bias,
            qk_norm=mixer.qk_norm,
            gated_attention=mixer.gated,
        )
    return BlockConfig(  # of a head that has no block
        intermediate_size=config.hidden_size,
        attention=AttentionSpec(1, 1, config.hidden_size, 1.0),
        rope=RopeSpec((), 0),
        eps=layer.eps,
    )


def _bits(tensor: Tensor) -> tuple[NDArray[np.uint16], str]:
    raw: NDArray[np.int16] = tensor.detach().cpu().to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return raw.view(np.uint16), "BF16"
