"""MTP: a layer that is used again for every draft step, or one for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headstart.layers.build import DecoderConfig, mtp_module
from headstart.layers.decoder import Decoder
from headstart.layers.mtp import HeadSpec, MTPModule
from headstart.train.head import EMBEDDING_SHARE, cast_weights, copied, layer_tensors
from headstart.train.kinds import HeadKind


def modules(
    masters: Mapping[str, Tensor], spec: HeadSpec, config: DecoderConfig, dtype: torch.dtype
) -> Sequence[MTPModule]:
    weights = cast_weights(masters, dtype)
    return [mtp_module(weights, f"mtp.{i}", config) for i in range(spec.num_modules)]


def initial(trunk: Decoder, spec: HeadSpec, scale: float) -> dict[str, Tensor]:
    """Block and final norm from the trunk's last layer, which reads a stream whose rms is about `scale`; the token's
    embedding enters at EMBEDDING_SHARE of that."""
    masters = {f"block.{name}": tensor for name, tensor in layer_tensors(trunk.layers[-1]).items()}
    final = trunk.norm.weight.detach().float()
    width = len(final)
    eye = torch.eye(width)
    masters |= {
        "norm_embedding.weight": torch.full((width,), scale),
        "norm_hidden.weight": torch.full((width,), scale),
        "projection.weight": torch.cat((EMBEDDING_SHARE * eye, eye)[:: -1 if spec.hidden_first else 1], dim=1),
        "norm.weight": 0.5 * final,  # modest logits: the first guesses are wrong
    }
    return copied({f"mtp.{i}.{name}": tensor for i in range(spec.num_modules) for name, tensor in masters.items()})


KIND = HeadKind("mtp", lambda layers, depth: HeadSpec(tap="pre_norm"), initial, modules, stacks=True)
"""It reads the stream before the final norm, as in the one dense family that vLLM drafts for (targets.vllm_mimo)."""
