"""Stacks of experts that lie the other way round in files of some families: [experts, in, out]."""

from __future__ import annotations

import re

import numpy as np

from headstart.formats.rows import Picked, Turned
from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig
from headstart.layers.moe import MoEConfig

STACK = re.compile(r"layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj")


def turned_stacks(
    tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool = False
) -> dict[str, RawTensor]:
    """Expert by expert, where a stack's shape is that of one turned (a square one is); gate first, then up."""
    ours: dict[str, RawTensor] = {}
    for name, tensor in tensors.items():
        match = STACK.fullmatch(name)
        part = config.layers[int(match[1])].mlp if match and int(match[1]) < config.num_layers else None
        if match is None or not isinstance(part, MoEConfig) or tensor.shape[1:] != _turned(config, part, match[2]):
            ours[name] = tensor
            continue
        for e in range(tensor.shape[0]):
            item = Turned(tensor.part(e))
            both = {"gate": np.arange(part.inner), "up": np.arange(part.inner, 2 * part.inner)}
            pieces = both if match[2] == "gate_up" else {"down": np.arange(config.hidden_size)}
            for piece, rows in pieces.items():
                ours[f"layers.{match[1]}.mlp.experts.{e}.{piece}_proj.weight"] = Picked(item, rows)
    return ours


def _turned(config: DecoderConfig, part: MoEConfig, kind: str) -> tuple[int, int]:
    """Shape of an item [in, out]."""
    return (config.hidden_size, 2 * part.inner) if kind == "gate_up" else (part.inner, config.hidden_size)
