"""Splits and joins fused projections (q, k and v; gate and up) and stacked experts, in layers and MTP modules."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from headstart.formats.rows import RowSubset, Transposed, row_parts
from headstart.kernels.ops import RawTensor
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.moe import MoEConfig
from headstart.models.small import Arrays

QKV, GATE_UP, SHARED_GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.shared_experts.gate_up_proj"


def split_joined(tensors: Mapping[str, RawTensor], config: DecoderConfig) -> dict[str, RawTensor]:
    """Tensors with fused matrices and biases split by rows. llama.cpp calls fused gate and up `ffn_up`."""
    found = dict(tensors)
    for prefix, layer in (*_layers(config), *_modules(config, "layers.{}", config.num_layers)):
        for joined, parts in _parts(layer).items():
            for end in ("weight", "bias"):
                name, rows = f"{prefix}.{joined}.{end}", sum(parts.values())
                up = f"{prefix}.mlp.up_proj.{end}"
                if joined == GATE_UP and name not in found and up in found and found[up].shape[0] == rows:
                    name = up
                if name in found and found[name].shape[0] == rows:
                    found |= {f"{prefix}.{p}.{end}": each for p, each in row_parts(found.pop(name), parts).items()}
    return found


def _layers(config: DecoderConfig) -> Iterator[tuple[str, LayerConfig]]:
    """(prefix of tensor names, config) of all layers and of the blocks of MTP modules."""
    yield from ((f"layers.{i}", layer) for i, layer in enumerate(config.layers))
    yield from _modules(config, "mtp.{}.block")


def _modules(config: DecoderConfig, prefix: str, first: int = 0) -> Iterator[tuple[str, LayerConfig]]:
    """(prefix of tensor names, config) of the blocks of MTP modules. first: number of the first one in the prefix."""
    for i in range(max(config.num_mtp, 1)) if config.mtp_layer else ():
        yield prefix.format(first + i), config.mtp_layer  # type: ignore[misc]  # mypy forgets the condition


def _parts(layer: LayerConfig) -> dict[str, dict[str, int]]:
    """Name of each fused matrix that a layer may have -> {name of a part: its number of rows}."""
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


def join(arrays: Arrays, config: DecoderConfig, *, qkv: bool, gate_up: bool) -> Arrays:
    """Inverse of `split_joined` for arrays. qkv, gate_up: which matrices are fused in the files."""
    found = dict(arrays)
    wanted = {QKV: qkv, GATE_UP: gate_up, SHARED_GATE_UP: gate_up}
    for prefix, layer in _layers(config):
        for joined, parts in _parts(layer).items():
            for end in ("weight", "bias"):
                names = [f"{prefix}.{part}.{end}" for part in parts]
                if wanted[joined] and all(name in found for name in names):
                    found[f"{prefix}.{joined}.{end}"] = np.concatenate([found.pop(name) for name in names])
    return found


EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.((?:gate|up|down)_proj\.(?:weight|bias))")
STACK = re.compile(r"layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj")


def transposed_experts(
    tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool = False
) -> dict[str, RawTensor]:
    """Splits stacks whose experts are transposed, [in, out], into single matrices; rows of gate precede those of up.
    Square matrices count as transposed. Other stacks are left to layers/moe.py."""
    ours: dict[str, RawTensor] = {}
    for name, tensor in tensors.items():
        match = STACK.fullmatch(name)
        part = config.layers[int(match[1])].mlp if match and int(match[1]) < config.num_layers else None
        if match is None or not isinstance(part, MoEConfig) or tensor.shape[1:] != _transposed(config, part, match[2]):
            ours[name] = tensor
            continue
        for e in range(tensor.shape[0]):
            item = Transposed(tensor.part(e))
            both = {"gate": np.arange(part.inner), "up": np.arange(part.inner, 2 * part.inner)}
            pieces = both if match[2] == "gate_up" else {"down": np.arange(config.hidden_size)}
            for piece, rows in pieces.items():
                ours[f"layers.{match[1]}.mlp.experts.{e}.{piece}_proj.weight"] = RowSubset(item, rows)
    return ours


def _transposed(config: DecoderConfig, part: MoEConfig, kind: str) -> tuple[int, int]:
    """Shape [in, out] of one transposed expert."""
    return (config.hidden_size, 2 * part.inner) if kind == "gate_up" else (part.inner, config.hidden_size)


def stacked_experts(arrays: Arrays, config: DecoderConfig, *, transposed: bool = False) -> Arrays:
    """Arrays with experts stacked, gate above up. transposed: as in `transposed_experts`."""
    theirs, experts = grouped_experts(arrays)
    for prefix, parts in experts.items():
        gates, ups, downs = (parts[f"{part}_proj.weight"] for part in ("gate", "up", "down"))
        both = [np.concatenate(pair) for pair in zip(gates, ups, strict=True)]
        for name, each in (("gate_up_proj", both), ("down_proj", downs)):
            theirs[f"{prefix}.{name}"] = np.stack([array.T for array in each] if transposed else each)
    return theirs


def alternating(gate: Any, up: Any) -> Any:
    """Rows of gate and up by turns."""
    return np.stack((gate, up), 1).reshape(-1, *up.shape[1:])


def grouped_experts(arrays: Arrays) -> tuple[Arrays, dict[str, dict[str, list[Any]]]]:
    """(other arrays, {prefix of experts: {part such as gate_proj.weight: its arrays by expert}})."""
    matches = {name: match for name in arrays if (match := EXPERT.fullmatch(name))}
    found: dict[str, dict[str, list[Any]]] = {}
    for name, match in sorted(matches.items(), key=lambda item: int(item[1][2])):
        found.setdefault(match[1], {}).setdefault(match[3], []).append(arrays[name])
    return {name: array for name, array in arrays.items() if name not in matches}, found
