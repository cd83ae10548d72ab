"""The table of families with MTP heads, and of drafters that are checkpoints of their own (mtp_families.toml).

`find_family` says what a config is (drafters.py, which drafter); `Layout.expected` which tensors its heads must have.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, Literal, NamedTuple

from headstart.errors import ModelError
from headstart.formats.symbols import NESTED, Sizes, as_size, lookup, text_config

MOST_MODULES = 64
MOST_EXPERTS = 4096
WRAPPER = r"(?:(?:model|language_model|text_model|llm|thinker|backbone)\.)*"
"""Regular expression of what may stand before a language model's names."""
_WRAPPER = re.compile(WRAPPER)


Dims = tuple[int | str | None, ...]


class Slot(NamedTuple):
    """A tensor that a head should have: canonical name and shape. Of a dimension that is not known, None is any, and a
    name the same size wherever it stands in a module. A shape of None is not known. `template` is the name without
    numbers."""

    name: str
    shape: Dims | None
    optional: bool
    template: str = ""


class Declared(NamedTuple):
    """What a config promises: number of MTP modules, and the key that says so (dotted; None: no key does)."""

    modules: int
    key: str | None


@dataclass(frozen=True, kw_only=True)
class Part:
    """Tensors that come together; see the table's comments."""

    shapes: Mapping[str, list[str]]
    when: str | None = None
    unless: str | None = None
    optional: bool = False
    needed: str | None = None
    together: bool = False
    alternative: str | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One family or one kind of drafter; see the table's comments for the fields."""

    key: str
    title: str
    tensors: Mapping[str, list[str]]
    model_types: tuple[str, ...] = ()
    gguf: tuple[str, ...] = ()
    requires: str | None = None
    note: str = ""
    stem: str = ""
    index: Literal["trailing", "own"] = "own"
    concat: str = ""
    norm: str = ""
    rope: Literal["trunk", "sliding", "none"] = "trunk"
    count_key: str = "num_nextn_predict_layers"
    default: int | None = None
    released: int | None = None
    most: int | None = None
    spare: int = 0
    open: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)
    own: tuple[str, ...] = ()
    per_layer: tuple[str, ...] = ()
    per_module: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    symbols: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    speculators: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()
    aux: Literal["input", "output"] | None = None
    count: tuple[str, ...] = ()
    targets: str = ""
    method: str = "mtp"
    says: Mapping[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    bare: Mapping[str, Any] = field(default_factory=dict)
    block: tuple[str, ...] = ()
    anchored: bool = False
    reduced: bool = False
    later: tuple[str, ...] = ()
    cut: bool = False
    family_block: bool = False

    def sizes(self, config: Mapping[str, Any]) -> Sizes:
        """The symbols of a checkpoint of this layout."""
        return Sizes({**symbols(), **self.symbols}, text_config(config))

    def canonical(self, name: str) -> str:
        """A tensor's name as the table has it: without wrappers, with this layout's renames."""
        name = strip(name)
        for old, new in self.rename:
            name = re.sub(rf"(^|\.){re.escape(old)}", rf"\g<1>{new}", name)
        return name

    def expected(self, sizes: Sizes, module: int, layer: int, present: Container[str]) -> Iterator[Slot]:
        """The tensors of one module, which stands at `layer` of the trunk's numbering; tensors that all modules share
        come with module 0. `present` are the canonical names that are there: they decide between alternatives."""
        parts = _parts()
        for prefix, names in self.tensors.items():
            shared = "{" not in prefix and not any("{i}" in each for name in names for each in parts[name].shapes)
            if (module and shared) or (not module and prefix in self.later):
                continue
            for name in names:
                if _applies(parts[name], sizes.config):
                    yield from _slots(parts[name], prefix, sizes, {"i": module, "layer": layer}, present)

    def prefixes(self) -> Iterator[str]:
        """Regular expressions of the beginnings of this layout's tensor names, {layer} and {i} as numbers."""
        for prefix in self.tensors:
            yield re.escape(prefix).replace(r"\{i\}", r"(\d+)").replace(r"\{layer\}", r"(\d+)")


def strip(name: str) -> str:
    """A tensor's name without the wrappers before a language model."""
    match = _WRAPPER.match(name)
    return name[match.end() :] if match else name


def _applies(part: Part, config: Mapping[str, Any]) -> bool:
    return (part.when is None or bool(config.get(part.when))) and not (part.unless and config.get(part.unless))


def _slots(part: Part, prefix: str, sizes: Sizes, where: Mapping[str, int], present: Container[str]) -> Iterator[Slot]:
    slots = list(_expand(part, prefix, sizes, where))
    if part.alternative and not any(slot.name in present for slot in slots):
        other = list(_slots(_parts()[part.alternative], prefix, sizes, where, present))
        if any(slot.name in present for slot in other):
            slots = other
    if part.together and any(slot.name in present for slot in slots):
        slots = [slot._replace(optional=False) for slot in slots]
    yield from slots


def _expand(part: Part, prefix: str, sizes: Sizes, where: Mapping[str, int]) -> Iterator[Slot]:
    optional = part.optional and not (part.needed and sizes.config.get(part.needed))
    for name, dims in part.shapes.items():
        shape = sizes.shape(dims)
        count = min(sizes.value("E") or 0, MOST_EXPERTS) if "{e}" in name else 1
        for expert in range(count):
            yield Slot((prefix + name).format(e=expert, **where), shape, optional, prefix + name)


def find_family(config: Mapping[str, Any], file_format: str = "safetensors") -> Layout | None:
    """The family of a config.json (or of a GGUF file's metadata in that shape); None for one that is not known."""
    kinds = [config.get("model_type"), text_config(config).get("model_type")]
    families = [each for each in families_by_key().values() if not each.requires or each.requires in config]
    if file_format == "gguf":
        return next((each for each in families if kinds[0] in (*each.gguf, *each.model_types)), None)
    known = [each for kind in kinds for each in families if kind in each.model_types]
    return next(iter(known or [each for each in families if has_architecture(config, each)]), None)


def has_architecture(config: Mapping[str, Any], layout: Layout) -> bool:
    """Is one of the layout's words a part of an architecture's name?"""
    names = config.get("architectures")
    written = " ".join(map(str, names)).lower() if isinstance(names, list) else ""
    return any(word in written for word in layout.architectures)


def declared(config: Mapping[str, Any], layout: Layout | None = None) -> Declared:
    """The MTP modules that a config promises, by any spelling of the key, nested or not; a family's own default where
    there is no key. ModelError for an absurd number."""
    promises = [
        (f"{prefix}{key}", value)
        for prefix in ("", *(f"{name}." for name in NESTED))
        for key in _table()["count_keys"]
        if (value := lookup(config, prefix + key)) is not None and not isinstance(value, list)
    ]
    sizes = [(key, as_size(value) or 0) for key, value in promises]
    key, count = next((pair for pair in sizes if pair[1]), sizes[0] if sizes else (None, 0))
    if count > MOST_MODULES:
        raise ModelError(f"config.json: {key} is {count}, but at most {MOST_MODULES} MTP modules make sense")
    if key is None and layout is not None and layout.default:
        return Declared(layout.default, None)
    spare = layout.spare if layout else 0
    return Declared(max(count - spare, min(count, 1)), key)


def families_by_key() -> Mapping[str, Layout]:
    """All families with native MTP."""
    return _layouts("families")


def drafters_by_key() -> Mapping[str, Layout]:
    """All kinds of drafters that are checkpoints of their own, in the table's order."""
    return _layouts("drafters")


def symbols() -> Mapping[str, Mapping[str, Any]]:
    """The table's symbols: the config keys of each, and what it is where none is there."""
    known: Mapping[str, Mapping[str, Any]] = _table()["symbols"]
    return known


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """The symbols of any model."""
    return Sizes(symbols(), text_config(config))


def num_experts(config: Mapping[str, Any]) -> int:
    """Experts of a layer that has them, by any spelling of the key; 0 without one."""
    return sizes_of(config).value("E") or 0


def count_keys() -> tuple[str, ...]:
    """Keys that say how many MTP modules there are, without the objects that they stand in."""
    return tuple(dict.fromkeys(key.rpartition(".")[2] for key in _table()["count_keys"]))


def gguf_layout(family: Layout | None = None) -> Layout:
    """Where a GGUF file keeps the MTP tensors of any family."""
    key = "gguf" if family and ";" in family.concat else "gguf_wide"
    return _layout(key, _table()[key])


@cache
def _layouts(section: str) -> Mapping[str, Layout]:
    return {key: _layout(key, row) for key, row in _table()[section].items()}


def _layout(key: str, row: Mapping[str, Any]) -> Layout:
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    values["rename"] = tuple((old, new) for old, new in row.get("rename", ()))
    return Layout(key=key, **values)


@cache
def _parts() -> Mapping[str, Part]:
    renamed = {"or": "alternative"}
    rows = _table()["parts"].items()
    return {name: Part(**{renamed.get(key, key): value for key, value in row.items()}) for name, row in rows}


@cache
def _table() -> dict[str, Any]:
    text = resources.files("headstart.formats").joinpath("mtp_families.toml").read_text("utf-8")
    return tomllib.loads(text)
