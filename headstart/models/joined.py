"""Projections that a file keeps in one matrix: q, k and v; gate and up; in MTP modules after the trunk's layers too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np

from headstart.formats.rows import Picked
from headstart.kernels.ops import RawTensor
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.moe import MoEConfig
from headstart.models.small import Arrays

QKV, GATE_UP, SHARED_GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.shared_experts.gate_up_proj"


def split_joined(tensors: Mapping[str, RawTensor], config: DecoderConfig) -> dict[str, RawTensor]:
    """Joined matrices and biases apart, as rows of the whole. llama.cpp calls gate and up together `ffn_up`."""
    found = dict(tensors)
    for prefix, layer in _layers(config, f"layers.{config.num_layers}"):
        for joined, parts in _parts(layer).items():
            for end in ("weight", "bias"):
                name, rows = f"{prefix}.{joined}.{end}", sum(parts.values())
                up = f"{prefix}.mlp.up_proj.{end}"
                if joined == GATE_UP and name not in found and up in found and found[up].shape[0] == rows:
                    name = up
                if name in found and found[name].shape[0] == rows:
                    found |= _apart(found.pop(name), prefix, parts, end)
    return found


def _layers(config: DecoderConfig, module: str) -> Iterator[tuple[str, LayerConfig]]:
    """What names of layers begin with; `module`: those of the first MTP module."""
    yield from ((f"layers.{i}", layer) for i, layer in enumerate(config.layers))
    if config.mtp_layer:
        yield module, config.mtp_layer


def _parts(layer: LayerConfig) -> dict[str, dict[str, int]]:
    """Joined matrices that a layer may have, and what they hold: names and rows."""
    found = {}
    if isinstance(layer.mixer, AttentionConfig):
        spec = layer.mixer.spec
        counts = (
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
            spec.num_kv_heads * spec.value_width,
        )
        found[QKV] = dict(zip((f"self_attn.{part}_proj" for part in "qkv"), counts, strict=True))
    if isinstance(layer.mlp, MLPConfig) and layer.mlp.gated:
        found[GATE_UP] = dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), layer.mlp.inner)
    if isinstance(layer.mlp, MoEConfig) and layer.mlp.shared:
        names = (f"mlp.shared_experts.{part}_proj" for part in ("gate", "up"))
        found[SHARED_GATE_UP] = dict.fromkeys(names, layer.mlp.shared)
    return found


def _apart(whole: RawTensor, layer: str, parts: Mapping[str, int], end: str) -> dict[str, RawTensor]:
    bounds = np.cumsum([0, *parts.values()])
    ranges = [np.arange(begin, stop) for begin, stop in pairwise(bounds)]
    return {f"{layer}.{part}.{end}": Picked(whole, rows) for part, rows in zip(parts, ranges, strict=True)}


def join(arrays: Arrays, config: DecoderConfig, *, qkv: bool, gate_up: bool) -> Arrays:
    """The way back, for arrays."""
    found = dict(arrays)
    wanted = {QKV: qkv, GATE_UP: gate_up, SHARED_GATE_UP: gate_up}
    for prefix, layer in _layers(config, "mtp.0.block"):
        for joined, parts in _parts(layer).items():
            for end in ("weight", "bias"):
                names = [f"{prefix}.{part}.{end}" for part in parts]
                if wanted[joined] and all(name in found for name in names):
                    found[f"{prefix}.{joined}.{end}"] = np.concatenate([found.pop(name) for name in names])
    return found
