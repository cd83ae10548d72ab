"""Native MTP modules: what the config promises against the tensors that are there."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from headstart.errors import ModelError
from headstart.formats.mtp_families import (
    MOST_MODULES,
    Declared,
    Layout,
    Slot,
    declared,
    find_family,
    gguf_layout,
    strip,
)
from headstart.tools.inspect.parts import MTP, Parts, by_part
from headstart.tools.inspect.weights import Weight

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_MARKERS = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
"""Tensors that only an MTP layer has, where MTP layers continue the trunk's numbering."""
_BLOCK_KINDS = ("self_attn.", "mlp.")


@dataclass(frozen=True)
class WrongShape:
    """A tensor of another shape than the config asks for; None is any size."""

    name: str
    shape: tuple[int, ...]
    expected: tuple[int | None, ...]


@dataclass(frozen=True)
class Module:
    """One MTP module: where it stands, how many of its tensors are there, and what is wrong with them."""

    index: int
    layer: int | None  # in the trunk's numbering, where that counts
    found: int
    required: int
    missing: list[str]
    wrong_shape: list[WrongShape]


@dataclass(frozen=True)
class Heads:
    """All that is known of a checkpoint's native heads. Names are canonical (without wrappers) but those of `names`."""

    family: Layout | None
    layout: Layout | None  # of the names: the family's, or GGUF's
    promised: Declared
    num_layers: int
    parts: Parts
    modules: list[Module]
    names: dict[str, str] = field(default_factory=dict)  # canonical -> the checkpoint's, of tensors of the heads
    extra: list[str] = field(default_factory=list)  # the checkpoint's names
    moved_to: tuple[int, ...] = ()  # layers that hold heads, where they are not those that the config asks for


def examine(weights: Mapping[str, Weight], config: Mapping[str, Any], file_format: str) -> Heads:
    """Compare. Raises ModelError for an absurd config."""
    family = find_family(config, file_format)
    layout = gguf_layout() if file_format == "gguf" else family
    promised = declared(config, family)
    sizes = (layout or gguf_layout()).sizes(config)
    num_layers = sizes.value("N") or 0
    canonical = layout.canonical if layout else (lambda name: name)
    parts = by_part(weights, num_layers)
    names = {canonical(name): name for name in parts.get(MTP, ())}
    if layout is None:
        return Heads(family, None, promised, num_layers, parts, [], names)
    layers, moved = _layers(layout, promised, num_layers, names, weights)
    if moved:
        names |= {canonical(name): name for name in weights if _layer_of(canonical(name)) in moved}
    shapes = {short: weights[name].shape for short, name in names.items()}
    wrapper = next((name.removesuffix(strip(name)) for name in names.values()), layout.stem)
    modules, used = [], set[str]()
    for index, layer in enumerate(layers):
        slots = list(layout.expected(sizes, index, layer, shapes))
        if file_format == "gguf":
            slots += _as_in_the_trunk(weights, layer, num_layers, shapes)
        modules.append(compare(index, layer if layout.index == "trailing" else None, slots, shapes, wrapper))
        used |= {slot.name for slot in slots}
    extra = [] if layout.open else [name for short, name in names.items() if short not in used]
    if moved:  # they stand among the trunk's layers
        inside = set(names.values())
        parts = {part: {n: w for n, w in group.items() if n not in inside} for part, group in parts.items()}
        parts[MTP] = {name: weights[name] for name in inside}
    return Heads(family, layout, promised, num_layers, parts, modules, names, sorted(extra), moved)


def _layers(
    layout: Layout, promised: Declared, num_layers: int, names: Mapping[str, str], weights: Collection[str]
) -> tuple[list[int], tuple[int, ...]]:
    """The layer of each module to look at, and the layers of heads that are not where the config has them."""
    if layout.index == "own":
        matches = [re.match(prefix, name) for name in names for prefix in layout.prefixes()]
        numbers = [int(match[1]) for match in matches if match and match.groups()]
        count = max(promised.modules, max(numbers, default=-1) + 1, int(bool(names)))
        return [num_layers + i for i in range(_checked(count))], ()
    marking = [layout.canonical(name) for name in weights if name.endswith(_MARKERS)]
    marked = {layer for name in marking if (layer := _layer_of(name)) is not None}
    trailing = {layer for name in names if (layer := _layer_of(name)) is not None}
    if marked and num_layers and min(marked) != num_layers and len(marked) >= promised.modules:
        return sorted(marked)[: _checked(len(marked))], tuple(sorted(marked))
    count = max(promised.modules, max(trailing, default=num_layers - 1) - num_layers + 1)
    return [num_layers + i for i in range(_checked(count))], ()


def _checked(count: int) -> int:
    if count > MOST_MODULES:
        hint = "is num_hidden_layers in config.json that of this model?"
        raise ModelError(f"{count} layers stand after the trunk's last one", hint)
    return count


def _layer_of(name: str) -> int | None:
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def compare(
    index: int,
    layer: int | None,
    slots: list[Slot],
    shapes: Mapping[str, tuple[int, ...] | None],
    wrapper: str = "",
) -> Module:
    """One module: the tensors it should have against those that are there. `wrapper` goes before reported names."""
    missing = [wrapper + slot.name for slot in slots if not slot.optional and slot.name not in shapes]
    wrong = [
        WrongShape(wrapper + slot.name, shape, slot.shape)
        for slot in slots
        if slot.shape is not None and (shape := shapes.get(slot.name)) is not None and not _fits(shape, slot.shape)
    ]
    there = sum(slot.name in shapes for slot in slots)
    return Module(index, layer, there, sum(not slot.optional for slot in slots), missing, wrong)


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    """Scalars may be written with or without a dimension."""
    if expected in ((1,), (None,)) and shape == ():
        return True
    return len(shape) == len(expected) and all(b in (None, a) for a, b in zip(shape, expected, strict=True))


def _as_in_the_trunk(weights: Collection[str], layer: int, num_layers: int, shapes: Mapping[str, object]) -> list[Slot]:
    """The block's tensors, read off the trunk layer that is most like it. Shapes may differ: sliding layers."""
    blocks: dict[int, set[str]] = {}
    for name in weights:
        if (match := _LAYER.fullmatch(name)) and match[2].startswith(_BLOCK_KINDS):
            blocks.setdefault(int(match[1]), set()).add(match[2])
    own = blocks.get(layer, set())
    trunk = [block for number, block in blocks.items() if number < num_layers and block]
    if not trunk or not any(name.startswith(f"layers.{layer}.") for name in shapes):
        return []
    like = max(trunk, key=lambda block: len(block & own) / len(block | own))
    return [Slot(f"layers.{layer}.{rest}", None, False) for rest in sorted(like)]
