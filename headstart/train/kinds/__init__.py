"""Kinds of heads that can be trained, one file each: what it declares, how it starts, the module of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart import registry
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import Decoder
from headstart.layers.mtp import HeadSpec, Module


@dataclass(frozen=True)
class HeadKind:
    """`spec`: for a trunk of so many layers. `initial`: (trunk, spec, rms of the stream that its last layer reads) ->
    float32 masters under canonical names. `module`: masters -> what runs, in an arithmetic; gradients reach them.
    `own_lm_head`: its file holds the LM head's rows too."""

    name: str
    spec: Callable[[int], HeadSpec]
    initial: Callable[[Decoder, HeadSpec, float], dict[str, Tensor]]
    module: Callable[[Mapping[str, Tensor], HeadSpec, DecoderConfig, torch.dtype], Module]
    own_lm_head: bool = False


def head_kind(name: str) -> HeadKind:
    """A kind by its name. Raises UsageError for an unknown one."""
    found: HeadKind = registry.find("head_kinds", name).KIND
    return found
