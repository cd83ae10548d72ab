"""Extraction of a checkpoint's MTP module: found by its family's names, checked for completeness, dequantized."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint, Tensor, strip_wrapper
from headstart.formats.quantization import ACTIVATIONS, AGAIN, StoredWeights, planned
from headstart.formats.safetensors import Planned, copied
from headstart.formats.sizes import Sizes, as_size, lookup, text_config
from headstart.models.base import Family
from headstart.models.families import find_mtp_family
from headstart.models.mtp import MTPLayout
from headstart.models.names import trailing_modules, trailing_name

DESCRIPTION = "quant_model_description.json"  # Ascend's description of quantized tensors
NORMS = ("mtp.0.norm_embedding.weight", "mtp.0.norm_hidden.weight", "mtp.0.norm.weight")
PROJECTION, BLOCK_NORM = "mtp.0.projection.weight", "mtp.0.block.input_layernorm.weight"
TWO_PROJECTIONS = ("mtp.0.e_proj.weight", "mtp.0.h_proj.weight")  # instead of PROJECTION in files of some families


def architectures(config: Mapping[str, Any]) -> list[str]:
    listed = config.get("architectures")
    return [str(each) for each in listed] if isinstance(listed, list) else []


@dataclass(frozen=True)
class ModulePlace:
    """Location of the MTP module in the files of a supported family, by a config.json."""

    model_type: str
    family: Family
    layout: MTPLayout
    config: Mapping[str, Any]

    @property
    def trailing(self) -> bool:
        """Whether the module is stored as the layer after the trunk's last."""
        return not self.family.names.of_modules

    @cached_property
    def num_layers(self) -> int:
        """Number of layers of the trunk. Raises ModelError if the config does not give it."""
        layers = text_config(self.config).get("num_hidden_layers")
        if not isinstance(layers, int) or not as_size(layers):
            raise ModelError(f"config.json: num_hidden_layers is {layers!r}", "the module is the layer after the last")
        return layers

    @cached_property
    def prefix(self) -> str:
        """Prefix of the names of the module's tensors, without wrappers."""
        if self.trailing:
            return f"layers.{self.num_layers}."
        parts = zip(*(self.written(name).split(".") for name in (*NORMS, BLOCK_NORM)), strict=False)
        return "".join(f"{words[0]}." for words in takewhile(lambda words: len({*words}) == 1, parts))

    def written(self, canonical: str) -> str:
        """Returns the name in the family's files, without wrappers."""
        theirs = self.family.names.theirs(trailing_name(canonical, self.num_layers) if self.trailing else canonical)
        return strip_wrapper(theirs)

    def inside(self, name: str) -> str | None:
        """Returns the name relative to the module; None for a tensor of the trunk."""
        name = strip_wrapper(name)
        return name.removeprefix(self.prefix) if name.startswith(self.prefix) else None

    def lacking(self, names: set[str]) -> list[str]:
        """Returns the required tensors of a module that are missing in `names`, by names relative to the module."""
        named = (self.family.names.canonical(name) for name in names)
        there: Any = {name: None for name in named if name}
        if self.trailing:
            there = trailing_modules(there, self.num_layers)
        projections = TWO_PROJECTIONS if any(name in there for name in TWO_PROJECTIONS) else (PROJECTION,)
        linking = (*NORMS, *projections, BLOCK_NORM)
        return [self.written(name).removeprefix(self.prefix) for name in linking if name not in there]


def find_module(config: Mapping[str, Any], model_type: str | None = None) -> ModulePlace | None:
    """Returns the module's location by a config.json, or by `model_type` if given; None for a family without modules.
    Raises ModelError for a config without a model type."""
    if not (model_type or config.get("model_type") or architectures(config)):
        raise ModelError("config.json names neither model_type nor architectures", "give --model-type")
    found = find_mtp_family({"model_type": model_type.lower()} if model_type else config)
    if found and found.layout.xllm and not model_type:
        text = text_config(config)
        kind = next((kind for key, kind in found.layout.xllm.variants.items() if text.get(key)), None)
        found = find_mtp_family({"model_type": kind}) if kind else found
    if found is None or found.layout.tensors:
        return None
    return ModulePlace(model_type.lower() if model_type else found.key, found.family, found.layout, config)


def count_modules(place: ModulePlace, *, several: bool = False) -> int:
    """Returns the config's number of MTP modules. Raises ModelError for none, or for several unless `several`."""
    count, key = place.layout.declared(place.config)
    if key is None and place.layout.released:
        return place.layout.released
    if key is None:
        hint = "the config promises no MTP head; graft one with headstart graft"
        raise ModelError(f"config.json has none of {place.layout.count_key} and other keys of that kind", hint)
    if not count:
        value = lookup(place.config, key)
        hint = "headstart graft MODEL --from ORIGINAL -o OUT puts one in"
        raise ModelError(f"config.json: {key} is {value!r}: the model has no MTP head", hint)
    if count != 1 and not several:
        raise ModelError(f"config.json: {key} is {count}, but this draft layout has room for one module")
    return count


class ModuleTensors(NamedTuple):
    """The tensors of a module: `tensors` by the checkpoint's names, `planned` with new names and types."""

    tensors: Mapping[str, Tensor]
    planned: list[Planned]
    notes: list[str]


def cut_module(
    source: Checkpoint, place: ModulePlace, rename: Callable[[str], str | None] | None = None, *, modules: int = 1
) -> ModuleTensors:
    """Returns the tensors of `modules` MTP modules, dequantized. `rename` gives the new name of a tensor, or None to
    leave it out; without `rename`, only the modules' tensors are taken, under their old names. Raises ModelError for
    an incomplete module."""
    rename = rename or (lambda name: name if place.inside(name) is not None else None)
    names = {name: new for name in source.tensors if (new := rename(name))}
    own = {name for name in names if place.inside(name) is not None}
    if not own:
        under = f"model.{place.prefix}" if place.trailing else place.prefix
        raise ModelError(f"{source.name} holds no tensors under {under}", "headstart inspect says which are there")
    weights = StoredWeights(source.tensors, source.config)
    _check_whole(source, place, {stored.name for stored in weights.stored.values() if stored.main.name in own}, modules)
    taken = Counter(names.values())  # if both have a tensor of one name, the module's replaces the trunk's
    borrowed = [name for name in names if not re.search(r"\.layers\.\d+\.", name)]
    for name in [name for name in borrowed if taken[names[name]] > 1]:
        del names[name]
    described = (source.path / DESCRIPTION).exists()  # then the engine can read quantized tensors
    plain = make_plain(names, weights, described)
    known = place.layout.xllm is not None and place.layout.xllm.fp8_blocks
    if plain.converted and not (known and all(name.endswith("_scale_inv") for name in plain.scales)):
        turned = f"{len(plain.converted)} quantized tensors were converted to bfloat16"
        plain.notes.append(f"{turned}; export_mtp.py copies them without their scales")
    return ModuleTensors({name: source.tensors[name] for name in names}, plain.planned, plain.notes)


def _check_whole(source: Checkpoint, place: ModulePlace, names: set[str], modules: int) -> None:
    inside = {str(place.inside(name)) for name in names}
    if lacking := place.lacking(names):
        raise ModelError(f"{source.name}: the MTP module lacks {', '.join(lacking)}", "download the model again")
    for layer in range(1, modules):
        if not any(name.startswith(f"layers.{layer}.") for name in inside):
            what = f"the MTP module has no decoder layer under layers.{layer}, which config.json promises"
            raise ModelError(f"{source.name}: {what}", "download the model again")
    promised = Sizes(source.config).get("experts") or 0
    experts = {int(match[1]) for name in inside if (match := re.search(r"\.experts\.(\d+)\.", name))}
    absent = next((each for each in range(promised) if each not in experts), None)
    if experts and absent is not None:
        what = f"the MTP module has {len(experts)} of {promised} experts; {absent} is missing"
        raise ModelError(f"{source.name}: {what}", AGAIN)


CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8")  # types whose values need scales


@dataclass
class DequantizedTensors:
    planned: list[Planned]
    converted: list[str]  # names of weights that were dequantized
    scales: set[str]  # names of their scales
    notes: list[str]


def make_plain(names: Mapping[str, str], weights: StoredWeights, described: bool = False) -> DequantizedTensors:
    """Plans the tensors of `names` (name -> new name), dequantized. `described`: DESCRIPTION explains the quantized
    tensors, which stay as they are, with scales. Raises ModelError for unknown packings, codes without scales and
    scales without codes."""
    plain = DequantizedTensors([], [], set(), [])
    for stored in weights.stored.values():
        main, auxiliary = stored.main, [each for each in stored.auxiliary.values() if each.name in names]
        if main.name not in names or (stored.word in ACTIVATIONS and not described):
            continue
        kept = described and not any(word.endswith("_scale_inv") for word in stored.auxiliary)
        if not kept and (decode := weights.decode(stored)):
            new = f"{names[main.name].rpartition('.')[0]}.weight" if stored.packed else names[main.name]
            plain.planned.append(planned(new, weights.shape(stored), decode))
            plain.converted.append(main.name)
            plain.scales |= {each.name for each in stored.auxiliary.values()} - _of_activations(stored.auxiliary)
            continue
        if main.dtype in CODES and not kept:
            raise ModelError(f"{main.name} is {main.dtype}, but has no scales", AGAIN)
        skipped = set() if kept else _of_activations(stored.auxiliary)
        plain.planned += [copied(names[each.name], each) for each in (main, *auxiliary) if each.name not in skipped]
    if not described and (lone := next((name for name in weights.loose if name in names), None)):
        raise ModelError(f"{lone} scales a weight that is not there", AGAIN)
    if dropped := [name for name in names if name.rpartition(".")[2] in ACTIVATIONS and not described]:
        plain.notes.append(f"{len(dropped)} scales of activations were left out")
    return plain


def _of_activations(auxiliary: Mapping[str, Tensor]) -> set[str]:
    return {each.name for word, each in auxiliary.items() if word in ACTIVATIONS}
