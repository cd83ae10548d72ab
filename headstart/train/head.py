"""What all kinds of heads in training share: casting masters, and what is taken from the trunk."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headstart.errors import UsageError
from headstart.layers.attention import Attention
from headstart.layers.decoder import Decoder, DecoderLayer
from headstart.layers.mlp import GatedMLP
from headstart.layers.norm import RMSNorm
from headstart.layers.weights import Weights
from headstart.train.masters import named, weights_of
from headstart.train.ops import DraftMemory, TrainOps

EMBEDDING_SHARE = 0.1
"""How strongly the token's embedding enters at the start, against the hidden state."""


@torch.inference_mode()
def stream_scale(trunk: Decoder, tokens: Tensor) -> float:
    """Median rms of what the last layer reads, over tokens [T]."""
    ops = TrainOps(tokens.device, trunk.embedding.dtype)
    positions = torch.arange(len(tokens), device=tokens.device)
    delta, residual = None, trunk.embed(ops, tokens[None])
    pools = trunk.pools([DraftMemory() for _ in trunk.kv_specs], [None] * len(trunk.state_specs))
    for layer, pool in zip(trunk.layers[:-1], pools, strict=False):
        delta, residual = layer(ops, delta, residual, positions, pool)
    stream = residual if delta is None else residual + delta
    return float(stream.float().square().mean(-1).sqrt().median())


def before_norm(final: Tensor, weight: Tensor) -> Tensor:
    """States after an RMSNorm of `weight` [W] -> what entered it, up to a positive factor per row (which the head's own
    norm takes out again) and zero where the weight is."""
    return torch.where(weight == 0, 0, final / weight).to(final.dtype)


def cast_weights(masters: Mapping[str, Tensor], dtype: torch.dtype) -> Weights:
    """Layer builders see the masters cast to `dtype`."""
    return weights_of(named(masters), dtype, "the head")


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Float32 masters of their own memory."""
    return {name: tensor.detach().float().clone().contiguous() for name, tensor in tensors.items()}


def layer_tensors(layer: DecoderLayer) -> dict[str, Tensor]:
    """Raises UsageError for a layer that a head's block cannot be."""
    attention, mlp = layer.mixer, layer.mlp
    norms = layer.input_norm, layer.post_norm
    if not (isinstance(attention, Attention) and isinstance(mlp, GatedMLP)):
        what = "experts" if isinstance(attention, Attention) else "latent or linear attention"
        raise UsageError(f"a block with {what}, like this model's, cannot be trained yet", "train --kind medusa")
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
