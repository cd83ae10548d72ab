"""Native MTP modules: what the config promises against the tensors that are there."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from headstart.errors import ModelError
from headstart.formats.mtp_families import (
    MOST_MODULES,
    Declared,
    Dims,
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
_TABLES = ("d2t", "t2d", "token_map", "token_ordering", "draft_token_ids")
_IDS = ("I64", "I32", "I16", "U16", "U32", "I8", "U8", "BOOL")
"""Types of masks and token ids, which are what tables hold, and no weight."""


@dataclass(frozen=True)
class WrongShape:
    """A tensor of another shape than the config asks for; None is any size."""

    name: str
    shape: tuple[int, ...]
    expected: Dims


@dataclass(frozen=True)
class Module:
    """One MTP module: where it stands, how many of its tensors are there, and what is wrong with them. `unusable`: why
    engines cannot take some of those that are there."""

    index: int
    layer: int | None  # in the trunk's numbering, where that counts
    found: int
    required: int
    missing: list[str]
    wrong_shape: list[WrongShape]
    unusable: list[str] = field(default_factory=list)


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
    layout = gguf_layout(family) if file_format == "gguf" else family
    promised = declared(config, family)
    sizes = (layout or gguf_layout()).sizes(config)
    num_layers = sizes.value("N") or 0
    if file_format == "gguf" and promised.key is None:
        num_layers -= _uncounted(weights, num_layers)
    canonical = layout.canonical if layout else (lambda name: name)
    parts = by_part(weights, num_layers)
    names = {canonical(name): name for name in parts.get(MTP, ())}
    if layout is None:
        return Heads(family, None, promised, num_layers, parts, [], names)
    layers, moved = _layers(layout, promised, num_layers, names, weights)
    if moved:
        names |= {canonical(name): name for name in weights if _layer_of(canonical(name)) in moved}
    own = {short: weights[name] for short, name in names.items()}
    wrapper = next((name.removesuffix(strip(name)) for name in names.values()), layout.stem)
    slots = [list(layout.expected(sizes, index, layer, own)) for index, layer in enumerate(layers)]
    if file_format == "gguf":
        for layer, each in zip(layers, slots, strict=True):
            each += _as_in_the_trunk(weights, layer, num_layers, own, family)
    alike(slots, own)
    trailing = layout.index == "trailing"
    modules = [
        compare(index, layer if trailing else None, each, own, wrapper)
        for index, (layer, each) in enumerate(zip(layers, slots, strict=True))
    ]
    used = {slot.name for each in slots for slot in each}
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


def _uncounted(weights: Collection[str], num_layers: int) -> int:
    """Blocks at the end of a GGUF file that are heads, where no key says so: all blocks are counted as the trunk's."""
    marked = {layer for name in weights if name.endswith(_MARKERS) and (layer := _layer_of(name)) is not None}
    return len(marked) if marked == set(range(num_layers - len(marked), num_layers)) else 0


def _checked(count: int) -> int:
    if count > MOST_MODULES:
        hint = "is num_hidden_layers in config.json that of this model?"
        raise ModelError(f"{count} layers stand after the trunk's last one", hint)
    return count


def _layer_of(name: str) -> int | None:
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def alike(modules: list[list[Slot]], present: Container[str]) -> None:
    """What may be absent must be absent from all modules: in place, the rest of it becomes required."""
    there = {slot.template for slots in modules for slot in slots if slot.optional and slot.name in present}
    for slots in modules:
        slots[:] = [slot._replace(optional=slot.optional and slot.template not in there) for slot in slots]


def compare(
    index: int, layer: int | None, slots: list[Slot], present: Mapping[str, Weight], wrapper: str = ""
) -> Module:
    """One module: the tensors it should have against those that are there. `wrapper` goes before reported names."""
    there = [(slot, present[slot.name]) for slot in slots if slot.name in present]
    sizes = _free_sizes(there)
    expected = {slot.name: tuple(sizes.get(each, each) for each in slot.shape) for slot, _ in there if slot.shape}
    wrong = [
        WrongShape(wrapper + slot.name, weight.shape, expected[slot.name])
        for slot, weight in there
        if slot.name in expected and weight.shape is not None and not _fits(weight.shape, expected[slot.name])
    ]
    return Module(
        index=index,
        layer=layer,
        found=len(there),
        required=sum(not slot.optional for slot in slots),
        missing=[wrapper + slot.name for slot in slots if not slot.optional and slot.name not in present],
        wrong_shape=wrong,
        unusable=[f"{wrapper}{slot.name} {why}" for slot, weight in there if (why := _why_unusable(slot, weight))],
    )


def _free_sizes(there: list[tuple[Slot, Weight]]) -> dict[object, int]:
    """Sizes that the config does not say, as most tensors that have them say."""
    seen: dict[str, Counter[int]] = {}
    for slot, weight in there:
        if slot.shape and weight.shape is not None and len(slot.shape) == len(weight.shape):
            for name, size in zip(slot.shape, weight.shape, strict=True):
                if isinstance(name, str):
                    seen.setdefault(name, Counter())[size] += 1
    return {name: sizes.most_common(1)[0][0] for name, sizes in seen.items()}


def _why_unusable(slot: Slot, weight: Weight) -> str:
    table = slot.name.rpartition(".")[2] in _TABLES
    if table != (weight.kind in _IDS):
        return f"is {weight.kind}, but {'whole numbers are' if table else 'a weight is'} wanted"
    return weight.problem


def _fits(shape: tuple[int, ...], expected: Dims) -> bool:
    """Scalars may be written with or without a dimension."""
    if expected in ((1,), (None,)) and shape == ():
        return True
    return (
        len(shape) == len(expected)
        and 0 not in shape
        and all(b in (None, a) for a, b in zip(shape, expected, strict=True))
    )


def _as_in_the_trunk(
    weights: Mapping[str, Weight], layer: int, num_layers: int, own: Mapping[str, Weight], family: Layout | None
) -> list[Slot]:
    """The tensors of the block, read off the trunk layer that is most like it; shapes too, where all are of a kind."""
    blocks: dict[int, dict[str, Weight]] = {}
    for name, weight in weights.items():
        if (match := _LAYER.fullmatch(name)) and match[2].startswith(_BLOCK_KINDS):
            blocks.setdefault(int(match[1]), {})[match[2]] = weight
    mine = blocks.get(layer, {}).keys()
    trunk = [block for number, block in blocks.items() if number < num_layers and block]
    if not trunk or not any(name.startswith(f"layers.{layer}.") for name in own):
        return []
    like = max(trunk, key=lambda block: len(block.keys() & mine) / len(block.keys() | mine))
    same = family is not None and family.rope == "trunk" and not family.own
    return [
        Slot(f"layers.{layer}.{rest}", weight.shape if same else None, False, f"layers.{{}}.{rest}")
        for rest, weight in sorted(like.items())
    ]
