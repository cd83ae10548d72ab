"""Medusa: one residual layer for each draft step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headstart.layers.build import DecoderConfig, medusa_modules
from headstart.layers.decoder import Decoder
from headstart.layers.medusa import MedusaModule
from headstart.layers.mtp import HeadSpec
from headstart.train.head import cast_weights
from headstart.train.kinds import HeadKind


def modules(
    masters: Mapping[str, Tensor], spec: HeadSpec, config: DecoderConfig, dtype: torch.dtype
) -> Sequence[MedusaModule]:
    return medusa_modules(cast_weights(masters, dtype), config, spec.num_modules)


def initial(trunk: Decoder, spec: HeadSpec, scale: float) -> dict[str, Tensor]:
    """Zeros, as in the paper: every head begins as the trunk's own next-token guess."""
    width = len(trunk.norm.weight)
    masters: dict[str, Tensor] = {}
    for k in range(spec.num_modules):
        masters |= {f"medusa.{k}.weight": torch.zeros(width, width), f"medusa.{k}.bias": torch.zeros(width)}
    return masters


KIND = HeadKind("medusa", lambda layers, depth: HeadSpec(num_modules=depth), initial, modules)
