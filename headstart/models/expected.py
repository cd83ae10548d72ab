"""Compares a head's expected tensors with those of a checkpoint, by headers only."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from headstart.formats.quantization import WeightHeader
from headstart.layers.shapes import Valueless

Dims = tuple[int | str | None, ...]
"""A shape. Each size is a number, the name of a size that is not in the config (equal names mean equal sizes), or None
for any size."""
TABLES = ("d2t", "t2d", "token_map", "token_ordering", "draft_token_ids")
"""Last part of the names of tensors that hold token ids or masks."""
ID_TYPES = ("I64", "I32", "I16", "U16", "U32", "I8", "U8", "BOOL")


class Slot(NamedTuple):
    """An expected tensor of a module."""

    name: str
    shape: Dims | None  # None: unknown
    optional: bool = False

    @property
    def template(self) -> str:
        """The name without the module's number."""
        return re.sub(r"\d+", "{}", self.name, count=1)


@dataclass(frozen=True)
class WrongShape:
    """A tensor whose shape differs from the one that the config implies."""

    name: str
    shape: tuple[int, ...]
    expected: Dims


@dataclass(frozen=True)
class ModuleCheck:
    """Result of comparing one module with its files."""

    index: int  # the module's number, from 0
    layer: int | None  # its layer number, if MTP layers follow the trunk's layers
    found: int  # number of its tensors in the files
    required: int  # number of required tensors
    missing: list[str]  # names of required tensors that are not in the files
    wrong_shape: list[WrongShape]
    unusable: list[str] = field(default_factory=list)  # "name reason" of tensors that engines cannot use


def slots_of(shapes: Mapping[str, tuple[Any, ...]]) -> Iterator[Slot]:
    """Slots of declared shapes, in which names of optional tensors begin with `?`."""
    for name, shape in shapes.items():
        yield Slot(name.removeprefix("?"), shape, name.startswith("?"))


def require_alike(modules: list[list[Slot]], present: Mapping[str, WeightHeader]) -> None:
    """Makes an optional tensor required in all modules, in place, if any module has it."""
    there = {slot.template for slots in modules for slot in slots if slot.optional and slot.name in present}
    for slots in modules:
        slots[:] = [slot._replace(optional=slot.optional and slot.template not in there) for slot in slots]


def compare(
    index: int, layer: int | None, slots: list[Slot], present: Mapping[str, WeightHeader], wrapper: str = ""
) -> ModuleCheck:
    """Compares one module's slots with the tensors in the files. wrapper: prefix of reported names."""
    there = [(slot, present[slot.name]) for slot in slots if slot.name in present]
    sizes = _free_sizes(there)
    expected = {slot.name: tuple(sizes.get(each, each) for each in slot.shape) for slot, _ in there if slot.shape}
    wrong = [
        WrongShape(wrapper + slot.name, weight.shape, expected[slot.name])
        for slot, weight in there
        if slot.name in expected and weight.shape is not None and not fits(weight.shape, expected[slot.name])
    ]
    return ModuleCheck(
        index=index, layer=layer, found=len(there), required=sum(not slot.optional for slot in slots),
        missing=[wrapper + slot.name for slot in slots if not slot.optional and slot.name not in present],
        wrong_shape=wrong,
        unusable=[f"{wrapper}{slot.name} {why}" for slot, weight in there if (why := why_unusable(slot.name, weight))],
    )  # fmt: skip


def _free_sizes(there: list[tuple[Slot, WeightHeader]]) -> dict[object, int]:
    """Name of a size that is not in the config -> its most frequent value in the files."""
    seen: dict[str, Counter[int]] = {}
    for slot, weight in there:
        if slot.shape and weight.shape is not None and len(slot.shape) == len(weight.shape):
            for name, size in zip(slot.shape, weight.shape, strict=True):
                if isinstance(name, str):
                    seen.setdefault(name, Counter())[size] += 1
    return {name: sizes.most_common(1)[0][0] for name, sizes in seen.items()}


def why_unusable(name: str, weight: WeightHeader) -> str:
    """Why engines cannot use a tensor; empty if they can."""
    table = name.rpartition(".")[2] in TABLES
    if table != (weight.kind in ID_TYPES):
        return f"is {weight.kind}, but {'whole numbers are' if table else 'a weight is'} wanted"
    return weight.problem


def fits(shape: tuple[int, ...], expected: Dims) -> bool:
    """True if a shape equals the expected one. A scalar equals a vector of one element."""
    if expected in ((1,), (None,)) and shape == ():
        return True
    return (
        len(shape) == len(expected)
        and 0 not in shape
        and all(b in (None, a) for a, b in zip(shape, expected, strict=True))
    )


Shape = tuple[int, ...]


def files_of(tensor: Any) -> tuple[str, ...]:
    """Names of the checkpoint's tensors that form a Valueless or a view of several (formats/rows.py)."""
    if isinstance(tensor, Valueless):
        return (tensor.name,)
    parts = getattr(tensor, "parts", None) or (tensor.source,)
    return tuple(dict.fromkeys(file for part in parts for file in files_of(part)))


@dataclass(frozen=True, eq=False)
class Outline:
    """Stands for a numpy array of which only the shape is known, in the operations of `Family.restore`."""

    shape: Shape

    def reshape(self, *shape: int) -> Outline:
        known = math.prod(size for size in shape if size != -1)
        free = math.prod(self.shape) // known if known else 0
        return Outline(tuple(free if size == -1 else size for size in shape))

    def __sub__(self, other: float) -> Outline:
        return self

    def __getitem__(self, index: None) -> Outline:
        return Outline((1, *self.shape))

    def __array_function__(self, function: Any, types: object, args: Any, kwargs: Any) -> Any:
        return _FUNCTIONS[function](*args, **kwargs)


def _concatenate(parts: Iterable[Outline], axis: int = 0) -> Outline:
    first, *others = (list(each.shape) for each in parts)
    first[axis] += sum(each[axis] for each in others)
    return Outline(tuple(first))


def _stack(parts: Sequence[Outline], axis: int = 0) -> Outline:
    shape = parts[0].shape
    return Outline((*shape[:axis], len(parts), *shape[axis:]))


def _hsplit(array: Outline, count: int) -> list[Outline]:
    return [Outline((array.shape[0], array.shape[1] // count, *array.shape[2:]))] * count


_FUNCTIONS: dict[Any, Callable[..., Any]] = {np.concatenate: _concatenate, np.stack: _stack, np.hsplit: _hsplit}
