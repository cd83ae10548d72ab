"""EAGLE-3: three streams of the trunk fused, one block, its own rows of the LM head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headstart.errors import UsageError
from headstart.layers.build import DecoderConfig, eagle3_module
from headstart.layers.decoder import Decoder, tapped_layers
from headstart.layers.eagle3 import Eagle3Module
from headstart.layers.mtp import HeadSpec
from headstart.train.head import EMBEDDING_SHARE, cast_weights, copied, layer_tensors
from headstart.train.kinds import HeadKind

FEWEST_LAYERS = 7
OTHER_STREAMS = 0.02
"""Weight of the lower streams at the start: not zero, so that they get gradients of their own."""


def spec(layers: int, depth: int) -> HeadSpec:
    """Low, middle and high layer as in the paper's code; llama.cpp wants exactly three."""
    if layers < FEWEST_LAYERS:
        raise UsageError(f"an EAGLE-3 head taps three layers apart, but the model has {layers}", "train --kind mtp")
    return HeadSpec(tap=(2, layers // 2, layers - 3), recycle="pre_norm")


def modules(
    masters: Mapping[str, Tensor], spec: HeadSpec, config: DecoderConfig, dtype: torch.dtype
) -> Sequence[Eagle3Module]:
    return [eagle3_module(cast_weights(masters, dtype), config, len(tapped_layers(spec.tap)))]


def initial(trunk: Decoder, spec: HeadSpec, scale: float) -> dict[str, Tensor]:
    """The trunk's last block over its highest tapped stream; the embedding enters attention at EMBEDDING_SHARE."""
    layer = layer_tensors(trunk.layers[-1])
    masters = {f"block.{name}": tensor.float() for name, tensor in layer.items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        own = masters[f"block.self_attn.{name}.weight"]
        masters[f"block.self_attn.{name}.weight"] = torch.cat((EMBEDDING_SHARE * own, own), dim=1)
    width = len(trunk.norm.weight)
    eye = torch.eye(width)
    masters |= {
        "fuse.weight": torch.cat([OTHER_STREAMS * eye] * (len(tapped_layers(spec.tap)) - 1) + [eye], dim=1),
        "block.hidden_norm.weight": layer["input_layernorm.weight"],
        "block.input_layernorm.weight": torch.ones(width),
        "norm.weight": 0.5 * trunk.norm.weight.float(),
    }
    return copied(masters)


KIND = HeadKind("eagle3", spec, initial, modules, own_lm_head=True)
