"""What all kinds of heads in training share: casting masters, and what a new head takes from the trunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.errors import UsageError
from headstart.heads.base import HeadSpec
from headstart.heads.kind import Start, Training, head_kind, plain_parts
from headstart.kernels.ops import StepInputs
from headstart.layers.attention import Attention
from headstart.layers.decoder import Decoder, DecoderLayer
from headstart.layers.mlp import GatedMLP
from headstart.layers.norm import RMSNorm
from headstart.train.masters import named, weights_of
from headstart.train.ops import DraftMemory, TrainOps


@torch.inference_mode()
def stream_scale(trunk: Decoder, tokens: Tensor) -> float:
    """Median rms of what the last layer reads, over tokens [T]."""
    ops = TrainOps(tokens.device, trunk.embedding.dtype)
    positions, no_rows = torch.arange(len(tokens), device=tokens.device), tokens[:0]
    kv, states = [DraftMemory() for _ in trunk.kv_specs], [None] * len(trunk.state_specs)
    program = trunk.program(kv, None, (len(trunk.layers) - 1,), states)
    stream = program(ops, StepInputs(tokens[None], positions, no_rows))["tapped"]
    return float(stream.float().square().mean(-1).sqrt().median())


def before_norm(final: Tensor, weight: Tensor) -> Tensor:
    """States after an RMSNorm of `weight` [W] -> what entered it, up to a positive factor per row (which the head's own
    norm takes out again) and zero where the weight is."""
    return torch.where(weight == 0, 0, final / weight).to(final.dtype)


def modules_of(masters: Mapping[str, Tensor], spec: HeadSpec, hidden: int, dtype: torch.dtype) -> Sequence[Any]:
    """What runs, over the masters cast to `dtype`: gradients reach them."""
    return head_kind(spec.kind).modules(weights_of(named(masters), dtype, "the head"), spec, hidden)


def first_weights(training: Training, spec: HeadSpec, trunk: Decoder, scale: float) -> dict[str, Tensor]:
    """Float32 masters of a new head, on the trunk's device. scale: of the stream (`stream_scale`)."""

    def layer() -> dict[str, NDArray[np.float32]]:
        tensors = layer_tensors(trunk.layers[-1])
        if spec.layer:
            plain_parts(spec.layer)  # now, not when the head is written
        return {name: _values(tensor) for name, tensor in tensors.items()}

    device, rng = trunk.embedding.device, np.random.default_rng(0)
    first = training.initial(Start(_values(trunk.norm.weight), scale, layer), spec)
    if training.random:
        first = {name: _random(values, rng) if values.ndim == 2 else values for name, values in first.items()}
    return {name: torch.tensor(values, dtype=torch.float32, device=device) for name, values in first.items()}


def _random(like: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.float32]:
    """Normal numbers of the usual scale, 1 / sqrt(columns)."""
    return rng.standard_normal(like.shape, np.float32) * np.float32(like.shape[1] ** -0.5)


def _values(tensor: Tensor) -> NDArray[np.float32]:
    values: NDArray[np.float32] = tensor.detach().float().cpu().numpy()
    return values


def layer_tensors(layer: DecoderLayer) -> dict[str, Tensor]:
    """Raises UsageError for a layer that a head's block cannot be."""
    attention, mlp = layer.mixer, layer.mlp
    norms = layer.input_norm, layer.post_norm
    if not (isinstance(attention, Attention) and isinstance(mlp, GatedMLP)):
        what = "experts" if isinstance(attention, Attention) else "latent or linear attention"
        raise UsageError(f"a block with {what}, like this model's, cannot be trained yet", "train --kind medusa")
    if attention.shares is not None:
        raise UsageError("a block that reads another layer's keys cannot be trained", "train --kind medusa")
    names = ("input_layernorm", "post_attention_layernorm")
    tensors: dict[str, Tensor] = {
        f"{name}.weight": norm.weight for name, norm in zip(names, norms, strict=True) if isinstance(norm, RMSNorm)
    }
    linears = {f"self_attn.{name}": getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    if attention.gate_proj:
        linears["self_attn.gate_proj"] = attention.gate_proj
    linears |= {f"mlp.{name}": getattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")}
    for name, linear in linears.items():
        tensors[f"{name}.weight"] = linear.weight
        if linear.bias is not None:
            tensors[f"{name}.bias"] = linear.bias
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name)
        if norm is not None:
            tensors[f"self_attn.{name}.weight"] = norm.weight
    return tensors
