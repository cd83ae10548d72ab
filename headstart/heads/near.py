"""How far back a head looks. The trunk's hidden state has seen the whole text already: behind 6,500 positions heads
draft as well with the latest 256 positions as with all (docs/LOG.md, 2026-11-24), some better, as they were trained on
short texts. What lies further back is neither made up for nor read again at each draft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from headstart.layers.attention import Attention
from headstart.layers.decoder import DecoderLayer

NEAR = 1024
"""Positions up to its own that a row of a head sees; far more than drafts have been seen to need."""


def near(modules: Iterable[Any], positions: int = NEAR) -> list[Any]:
    """The same modules; layers of theirs with attention and keys of their own see so many positions where they saw
    more. Latent attention (MLA), chunks, and modules of plug-ins that are no dataclasses stay."""
    return [_module(module, positions) if module.kv_specs and is_dataclass(module) else module for module in modules]


def _module(module: Any, positions: int) -> Any:
    found = {field.name: getattr(module, field.name) for field in fields(module)}
    single = {name: _layer(value, positions) for name, value in found.items() if isinstance(value, DecoderLayer)}
    several = {
        name: [_layer(layer, positions) for layer in value] for name, value in found.items() if _are_layers(value)
    }
    return replace(module, **single, **several)


def _are_layers(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, DecoderLayer) for each in value)


def _layer(layer: DecoderLayer, positions: int) -> DecoderLayer:
    mixer = layer.mixer
    if not isinstance(mixer, Attention) or mixer.spec.chunk or 0 < mixer.spec.window <= positions:
        return layer
    return replace(layer, mixer=replace(mixer, spec=replace(mixer.spec, window=positions)))
