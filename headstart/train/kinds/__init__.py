"""Kinds of heads that can be trained, one file each: what it declares, how it starts, the module of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headstart import registry
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import Decoder
from headstart.layers.mtp import HeadSpec, Module


@dataclass(frozen=True)
class HeadKind:
    """`spec`: for a trunk of so many layers and so many draft steps. `initial`: (trunk, spec, rms of the stream that
    its last layer reads) -> float32 masters under canonical names. `modules`: masters -> what runs, in an arithmetic;
    gradients reach them. `own_lm_head`: its file holds the LM head's rows too. `stacks`: it may have a module for each
    draft step instead of one that is used again."""

    name: str
    spec: Callable[[int, int], HeadSpec]
    initial: Callable[[Decoder, HeadSpec, float], dict[str, Tensor]]
    modules: Callable[[Mapping[str, Tensor], HeadSpec, DecoderConfig, torch.dtype], Sequence[Module]]
    own_lm_head: bool = False
    stacks: bool = False


def head_kind(name: str) -> HeadKind:
    """A kind by its name. Raises UsageError for an unknown one."""
    found: HeadKind = registry.find("head_kinds", name).KIND
    return found
