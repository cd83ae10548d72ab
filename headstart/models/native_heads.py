"""Compares the native MTP modules that a config declares with the tensors in the files, by headers only.

`inspect` and loading share this check. For a family that runs, the headers pass through the loader's renaming
(models/tensors.py), and the resulting shapes are compared with those that the head's layers declare.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint, strip_wrapper
from headstart.formats.gguf_names import gguf_name
from headstart.formats.quantization import WeightHeader, weight_headers
from headstart.formats.sizes import Sizes
from headstart.formats.tensor_parts import EXPERTS, LAYERS, MTP, PARTS, part_of
from headstart.heads.base import MAX_MODULES, HeadSpec
from headstart.heads.kind import head_kind
from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig
from headstart.layers.mla import MLAConfig
from headstart.layers.moe import MoEConfig
from headstart.layers.shapes import Valueless
from headstart.layers.weights import Shapes
from headstart.models.base import Family
from headstart.models.expected import (
    ModuleCheck,
    Outline,
    Slot,
    WrongShape,
    compare,
    files_of,
    fits,
    require_alike,
    slots_of,
    why_unusable,
)
from headstart.models.families import FoundFamily, find_mtp_family
from headstart.models.mtp import MAX_EXPERTS, Declared, MTPLayout, declared
from headstart.models.names import trailing_modules, trailing_name
from headstart.models.tensors import renamed_tensors

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_MODULE = re.compile(r"mtp\.(\d+)\.")
_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj|(?:gate|up|down)_proj\.weight)")
_EXPERT = re.compile(r"\.experts\.(\d+\.|(?=gate_up_proj$|down_proj$))")
MARKERS = ("eh_proj.weight", "enorm.weight", "hnorm.weight")
"""Name endings that identify an MTP layer in families whose MTP layers follow the trunk's layers."""
COPIES = {
    "embed_tokens.weight": "embedding", "emb.tok_emb.weight": "embedding", "shared_head.head.weight": "lm_head",
    "head.weight": "lm_head",
}  # fmt: skip
"""Name inside a module -> the trunk's tensor of which it is a copy."""
Parts = dict[str, dict[str, WeightHeader]]  # weights of each part of a model, by name


@dataclass(frozen=True)
class NativeHeads:
    """Result of comparing a checkpoint's native heads with its config."""

    found: FoundFamily | None  # None: the family is unknown or has no MTP modules
    promised: Declared  # MTP modules that the config declares
    num_layers: int  # layers of the trunk
    parts: Parts
    gguf: str = ""  # llama.cpp's architecture of a GGUF file; empty for other formats
    modules: list[ModuleCheck] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # heads' tensors: name without wrappers -> name in the files
    extra: list[str] = field(default_factory=list)  # MTP tensors in the files that the family's head does not have
    moved_to: tuple[int, ...] = ()  # layers with MTP tensors, if they do not start after num_hidden_layers
    unread: ModelError | None = None  # set if the config could not be read, so that nothing was checked
    refused: str = ""  # why the heads cannot run, whatever their tensors are
    unchecked: bool = False  # the family is unknown, so that nothing was checked

    @property
    def layout(self) -> MTPLayout | None:
        return self.found.layout if self.found else None

    @property
    def norm(self) -> Literal["w", "1+w"]:
        """See Family.norm."""
        return self.found.family.norm if self.found else "w"

    @property
    def concat(self) -> str:
        """Order of embedding and hidden state in the projection's input; `sum`: each has a projection."""
        if self.found is None or self.found.layout.tensors or not self.found.layout.concat:
            return self.layout.concat if self.layout else ""
        head = self.found.family.head
        return "" if head is None else "sum" if head.tap == "streams" else "h;e" if head.hidden_first else "e;h"

    @property
    def copies(self) -> dict[str, str]:
        """`embedding`, `lm_head` -> name of the first module's copy of the trunk's tensor, if there is one."""
        trailing = f"layers.{self.num_layers}."
        found: dict[str, str] = {}
        for short, name in self.names.items():
            inside = re.sub(r"^mtp\.(0\.)?", "", short.removeprefix(trailing))
            if inside in COPIES and COPIES[inside] not in (self.layout.own if self.layout else ()):
                found[COPIES[inside]] = name
        return found

    @property
    def count(self) -> int:
        """Number of MTP modules that the engine would run."""
        return self.promised.modules or (len(self.modules) if self.layout and self.layout.released else 0)


def examine(checkpoint: Checkpoint, weights: Mapping[str, WeightHeader] | None = None) -> NativeHeads:
    """Compares the MTP modules that a config declares with the tensors in the files.

    weights: headers of the whole checkpoint; None: only headers of tensors that may belong to heads are read. Raises
    ModelError for impossible numbers in the config.
    """
    config, from_gguf = checkpoint.config, checkpoint.format == "gguf"
    found = find_mtp_family(config, from_gguf=from_gguf)
    layout = found.layout if found else None
    promised = layout.declared(config) if layout else declared(config)
    num_layers = Sizes(config).get("layers") or 0
    if weights is None:
        outside = {name: each for name, each in checkpoint.tensors.items() if _may_be_heads(name, num_layers)}
        weights = weight_headers(outside, config)
    architecture = str(config.get("model_type")) if from_gguf else ""
    heads = NativeHeads(found, promised, num_layers, by_part(weights, num_layers), architecture)
    if found and not found.layout.tensors:
        return _as_loaded(heads, found.family, config, weights)
    if from_gguf:
        return _like_the_trunk(heads, weights, Sizes(config))
    if found is None:
        return replace(heads, names={strip_wrapper(name): name for name in heads.parts.get(MTP, ())}, unchecked=True)
    return _as_declared(heads, found.layout, weights, Sizes(config))


def check_separate_module(
    found: FoundFamily, config: Mapping[str, Any], weights: Mapping[str, WeightHeader]
) -> ModuleCheck | None:
    """The check of a module that is published without its trunk, under the same names as with it. None if its config
    cannot be read, or the engine cannot run the family."""
    if found.layout.tensors:
        return None
    num_layers = Sizes(config).get("layers") or 0
    heads = NativeHeads(found, Declared(1, None), num_layers, by_part(weights, num_layers))
    return next(iter(_as_loaded(heads, found.family, config, weights).modules), None)


def by_part(weights: Mapping[str, WeightHeader], num_layers: int) -> Parts:
    """Weights grouped by part of the model, in the order of PARTS; without empty parts."""
    parts: Parts = {part: {} for part in PARTS}
    for name, weight in weights.items():
        parts[part_of(name, num_layers)][name] = weight
    return {part: group for part, group in parts.items() if group}


def _may_be_heads(name: str, num_layers: int) -> bool:
    return part_of(name, num_layers) not in (LAYERS, EXPERTS)


# Families that run.


def _as_loaded(
    heads: NativeHeads, family: Family, config: Mapping[str, Any], weights: Mapping[str, WeightHeader]
) -> NativeHeads:
    names = {strip_wrapper(name): name for name in heads.parts.get(MTP, ())}
    trailing = bool(heads.gguf) or not family.names.of_modules
    if trailing and (moved := _moved(heads, weights)):
        return _at_another_layer(heads, weights, moved)
    heads = replace(heads, names=names)
    present = _count_present(names, family, heads.num_layers, trailing=trailing)
    count = max(heads.promised.modules, present)
    if not count:
        return heads
    try:
        sizes = _read(config, family, heads.promised.modules, count)
    except ModelError as error:
        if heads.gguf:
            return _like_the_trunk(heads, weights, Sizes(config))
        return replace(heads, unread=error)
    if sizes.no_drafter:
        return replace(heads, refused=sizes.no_drafter)
    outside = {name: each for name, each in weights.items() if _may_be_heads(name, heads.num_layers)}
    check = _LoadCheck(heads, family, sizes, trailing, outside)
    modules = [check.module(i) for i in range(sizes.num_mtp)]
    return replace(heads, modules=modules, extra=sorted(check.extra(names.values())))


def _count_present(names: Iterable[str], family: Family, num_layers: int, *, trailing: bool) -> int:
    """Number of MTP modules with at least one tensor in the files, up to the last such module."""
    if trailing:
        numbers = [int(match[1]) - num_layers for name in names if (match := _LAYER.match(name))]
    else:
        canonical = (family.names.canonical(name) for name in names)
        numbers = [int(match[1]) for name in canonical if name and (match := _MODULE.match(name))]
    return _checked(max(numbers, default=-1) + 1)


def _read(config: Mapping[str, Any], family: Family, promised: int, count: int) -> DecoderConfig:
    """Sizes and layers with `count` modules; with the declared number if the family cannot read that many."""
    if count != promised:
        try:
            found = family.read({**config, "num_nextn_predict_layers": count}, strict=False)
            return replace(found, num_mtp=count)
        except ModelError:
            if not promised:
                raise
    return replace(family.read(config, strict=False), num_mtp=promised)


class _LoadCheck:
    """Compares the modules' canonical tensors, as the loader makes them, with the shapes that the loader requires."""

    def __init__(
        self, heads: NativeHeads, family: Family, config: DecoderConfig, trailing: bool,
        weights: Mapping[str, WeightHeader],
    ) -> None:  # fmt: skip
        self.heads, self.family, self.trailing, self.weights = heads, family, trailing, weights
        spec = family.head_of(config)
        assert spec is not None
        self.config, self.spec = config, _capped(spec)
        self.expected = head_kind(spec.kind).shapes(self.spec, config.hidden_size)
        self.there = self._renamed({name: weight.shape or (0,) for name, weight in weights.items()})
        kept = {file for tensor in self.there.values() for file in files_of(tensor)}
        self.dropped = {*heads.names.values()} - kept
        self.used: set[str] = set()
        self.reported: set[str] = set()

    def _renamed(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, RawTensor]:
        """Passes headers through the loader's renaming, and splits stacks of experts."""
        read = {name: Valueless(name, shape) for name, shape in shapes.items()}
        tensors = renamed_tensors(read, self.family, self.config, from_gguf=bool(self.heads.gguf))
        return _unstacked(trailing_modules(tensors, self.config.num_layers))

    def module(self, index: int) -> ModuleCheck:
        """The check of one module; the first one includes tensors that all modules share."""
        prefix = f"mtp.{index}."
        files: dict[str, None] = {}
        lacking: list[str] = []
        for name, shape in self.expected.items():
            if name.startswith(prefix):
                there = self._provided(name, shape)
                files |= dict.fromkeys(there or ())
                if there is None:
                    lacking.append(name)
        missing, wrong = self._problems(lacking)
        copies = [name for name in self.heads.names.values() if self._is_copy(name, index)]
        mine = {*self.heads.names.values()} - self.used
        own = [name for name in (*files, *copies, *(each.name for each in wrong)) if name in mine]
        self.used |= {*own}
        return ModuleCheck(
            index=index, layer=self.heads.num_layers + index if self.trailing else None, found=len(own),
            required=len(own) + len(missing), missing=missing, wrong_shape=wrong,
            unusable=[f"{name} {why}" for name in own if (why := why_unusable(name, self.weights[name]))],
        )  # fmt: skip

    def _provided(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...] | None:
        """Names of the checkpoint's tensors that form a canonical tensor; None if missing or of another shape."""
        tensor = self.there.get(name)
        if tensor is None:
            return self._latent_parts(name, shape)
        files = files_of(tensor)
        packed = any(self.weights[file].shape is None for file in files)
        return files if packed or fits(tuple(tensor.shape), shape) else None

    def _latent_parts(self, name: str, shape: tuple[int, ...]) -> tuple[str, ...] | None:
        """GGUF files have MLA's kv_b_proj [heads * (nope + value), latent] as k_b_proj [heads, latent, nope] and
        v_b_proj [heads, value, latent]."""
        parts = [self.there.get(name.replace(".kv_b_proj.", f".{part}_b_proj.")) for part in "kv"]
        if ".kv_b_proj." not in name or parts[0] is None or parts[1] is None:
            return None
        (heads, latent, nope), (count, value, width) = parts[0].shape, parts[1].shape
        whole = (heads * (nope + value), latent)
        return files_of(parts[0]) + files_of(parts[1]) if whole == shape and (count, width) == (heads, latent) else None

    def _is_copy(self, name: str, index: int) -> bool:
        """True if the tensor is this module's copy of the trunk's embedding or LM head, which the loader ignores."""
        if name not in self.dropped or name.endswith("inv_freq"):
            return False
        match = re.search(r"\d+", strip_wrapper(name))
        number = int(match[0]) if match else 0
        return index == (number - self.heads.num_layers if self.trailing else number)

    def _problems(self, lacking: list[str]) -> tuple[list[str], list[WrongShape]]:
        """(missing, wrong shapes) by the checkpoint's names. lacking: canonical tensors that are not provided."""
        missing: dict[str, None] = {}
        wrong: dict[str, WrongShape] = {}
        for name in lacking:
            files = [file for file in self._files_of[name] if file not in self.reported]
            there = {file: self.heads.names.get(strip_wrapper(file)) for file in files}
            if len(files) == 1 and name in self.there:  # the checkpoint uses another known name
                there = dict.fromkeys(files, next(iter(files_of(self.there[name])), None))
            flawed = {file: self._flaw(file, held) for file, held in there.items()}
            for file, flaw in flawed.items():
                if flaw is not None:
                    wrong[file] = flaw
                elif there[file] is None:
                    missing[self._written(file)] = None
            if files and there[files[0]] and not any(flawed.values()) and None not in there.values():
                held = str(there[files[0]])  # the parts have the right shapes, but do not form the canonical tensor
                wrong[files[0]] = WrongShape(held, self.weights[held].shape or (), self.expected[name])
            self.reported |= {*files} & ({*wrong} | {file for file in files if there[file] is None})
        return list(missing), list(wrong.values())

    def _flaw(self, file: str, there: str | None) -> WrongShape | None:
        """The error for a tensor `there` that differs in shape from `file` in the family's own files; None if equal."""
        shape = self.weights[there].shape if there else None
        expected = self._file_shapes[file]
        return WrongShape(str(there), shape, expected) if shape is not None and not fits(shape, expected) else None

    def _written(self, name: str) -> str:
        """The name that this checkpoint would use for a tensor of the family's own files."""
        if self.heads.gguf:
            return gguf_name(name) or name
        there = next(iter(self.heads.names.items()), None)
        return name if there is None else there[1].removesuffix(there[0]) + strip_wrapper(name)

    @cached_property
    def _file_shapes(self) -> Shapes:
        """Name -> shape of the modules' tensors in the family's own files, or in GGUF files."""
        outlines: Any = {name: Outline(shape) for name, shape in self.expected.items()}
        if not self.heads.gguf:
            return {name: each.shape for name, each in self.family.as_published(outlines, self.config).items()}
        restored = outlines
        if self.family.restore:
            whole = {name: each for name, each in outlines.items() if name.endswith(self.family.whole_in_gguf)}
            others = {name: each for name, each in outlines.items() if name not in whole}
            restored = whole | self.family.restore(others, self.config)
        restored = {name: each for name, each in restored.items() if not _EXPERT.search(name)}
        shapes: Shapes = {}
        for name, each in {**restored, **{n: each for n, each in outlines.items() if _EXPERT.search(n)}}.items():
            shapes |= self._gguf_shapes(trailing_name(name, self.config.num_layers), each.shape)
        return shapes

    def _gguf_shapes(self, name: str, shape: tuple[int, ...]) -> Shapes:
        """Names and shapes of one tensor in GGUF files: experts are stacked; kv_b_proj has two parts if one exists."""
        layer = self.spec.layer
        if _EXPERT.search(name) and layer and isinstance(layer.mlp, MoEConfig):
            return {_EXPERT.sub(".experts.", name): (layer.mlp.router.num_experts, *shape)}
        parts = [name.replace(".kv_b_proj.", f".{part}_b_proj.") for part in "kv"]
        if layer and isinstance(layer.mixer, MLAConfig) and {*parts} & {*self.heads.names} - {name}:
            mla = layer.mixer
            k, v = (mla.num_heads, mla.latent, mla.nope), (mla.num_heads, mla.value, mla.latent)
            return dict(zip(parts, (k, v), strict=True))
        return {name: shape}

    @cached_property
    def _files_of(self) -> dict[str, tuple[str, ...]]:
        """Canonical name -> names in `_file_shapes` of the tensors that form it."""
        renamed = self._renamed(self._file_shapes)
        files = {name: files_of(tensor) for name, tensor in renamed.items()}
        for name in self.expected.keys() - files.keys():
            files[name] = tuple(file for part in "kv" for file in files[name.replace(".kv_b_", f".{part}_b_")])
        return files

    def extra(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name not in self.used]


def _unstacked(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """Tensors with stacks of experts split into single matrices (layers/moe.py reads both)."""
    found: dict[str, RawTensor] = {}
    for name, tensor in tensors.items():
        match = _STACK.fullmatch(name)
        if match is None or len(tensor.shape) != 3 or not name.startswith("mtp."):
            found[name] = tensor
            continue
        part = match[2].removesuffix("_proj.weight").removesuffix("_proj")
        for expert in range(min(tensor.shape[0], MAX_EXPERTS)):
            item, at = tensor.part(expert), f"{match[1]}.{expert}"
            if part == "gate_up":
                half = np.arange(item.shape[0] // 2)
                found |= {f"{at}.{each}_proj.weight": item.take_rows(half) for each in ("gate", "up")}
            else:
                found[f"{at}.{part}_proj.weight"] = item
    return found


def _capped(spec: HeadSpec) -> HeadSpec:
    """The spec with at most MAX_EXPERTS experts."""
    layer = spec.layer
    if layer is None or not isinstance(layer.mlp, MoEConfig) or layer.mlp.router.num_experts <= MAX_EXPERTS:
        return spec
    router = replace(layer.mlp.router, num_experts=MAX_EXPERTS, num_identity=0)
    return replace(spec, layer=replace(layer, mlp=replace(layer.mlp, router=router)))


def _moved(heads: NativeHeads, weights: Mapping[str, WeightHeader]) -> tuple[int, ...]:
    """Layers with MTP tensors, if they are not the first layers after num_hidden_layers; else empty."""
    matches = (_LAYER.match(strip_wrapper(name)) for name in weights if name.endswith(MARKERS))
    marked = sorted({int(match[1]) for match in matches if match})
    if marked and heads.num_layers and marked[0] != heads.num_layers and len(marked) >= heads.promised.modules:
        return tuple(marked)
    return ()


def _at_another_layer(heads: NativeHeads, weights: Mapping[str, WeightHeader], moved: tuple[int, ...]) -> NativeHeads:
    """The result for heads at layers where engines do not look for them; their shapes are not checked."""
    places = {layer: [] for layer in moved}  # type: dict[int, list[str]]
    for name in weights:
        if (match := _LAYER.match(strip_wrapper(name))) and int(match[1]) in places:
            places[int(match[1])].append(name)
    modules = [
        ModuleCheck(index, layer, len(names), len(names), [], [])
        for index, (layer, names) in enumerate(sorted(places.items()))
    ]
    inside = {name for names in places.values() for name in names}
    parts = {part: {n: w for n, w in group.items() if n not in inside} for part, group in heads.parts.items()}
    parts[MTP] = {name: weights[name] for name in inside}
    names = {strip_wrapper(name): name for name in inside}
    return replace(heads, parts=parts, modules=modules, names=names, moved_to=moved)


# Families that the engine cannot run, and GGUF files that no family can read.


def _as_declared(
    heads: NativeHeads, layout: MTPLayout, weights: Mapping[str, WeightHeader], sizes: Sizes
) -> NativeHeads:
    """Compares the modules with the tensors that other engines load (MTPLayout.tensors)."""

    assert layout.tensors
    if layout.trailing and (moved := _moved(heads, weights)):
        return _at_another_layer(heads, weights, moved)
    names = {strip_wrapper(name): name for name in heads.parts.get(MTP, ())}
    own = {short: weights[name] for short, name in names.items()}
    pattern = r"layers\.(\d+)\." if layout.trailing else r"mtp\w*\.(?:layers\.)?(\d+)\."
    first = heads.num_layers if layout.trailing else 0
    numbers = [int(match[1]) - first for name in names if (match := re.match(pattern, name))]
    count = max(heads.promised.modules, max(numbers, default=-1) + 1, int(bool(names) and not layout.trailing))
    slots = [list(slots_of(layout.tensors(sizes, i, heads.num_layers + i, own))) for i in range(_checked(count))]
    require_alike(slots, own)
    usual = "model." if layout.trailing else ""
    wrapper = next((name.removesuffix(strip_wrapper(name)) for name in names.values()), usual)
    modules = [
        compare(i, heads.num_layers + i if layout.trailing else None, each, own, wrapper)
        for i, each in enumerate(slots)
    ]
    used = {slot.name for each in slots for slot in each}
    extra = sorted(name for short, name in names.items() if short not in used) if layout.closed else []
    return replace(heads, modules=modules, names=names, extra=extra)


def _checked(count: int) -> int:
    if count > MAX_MODULES:
        hint = "is num_hidden_layers in config.json that of this model?"
        raise ModelError(f"{count} layers stand after the trunk's last one", hint)
    return count


def _like_the_trunk(heads: NativeHeads, weights: Mapping[str, WeightHeader], sizes: Sizes) -> NativeHeads:
    """The check for a GGUF file whose metadata no family can read: llama.cpp's module around a block that resembles a
    layer of the trunk."""
    names = {name: name for name in heads.parts.get(MTP, ())}
    own = {name: weights[name] for name in names}
    layers = {int(match[1]) - heads.num_layers for name in names if (match := _LAYER.match(name))}
    count = _checked(max(heads.promised.modules, max(layers, default=-1) + 1))
    joined = heads.layout is not None and heads.concat != "sum"  # one projection of both inputs
    modules = []
    for i in range(count):
        layer = heads.num_layers + i
        at, hidden, vocabulary = f"layers.{layer}.", sizes["hidden"], sizes["vocabulary"]
        shapes = {
            f"{at}eh_proj.weight": (hidden, 2 * hidden),
            f"{at}enorm.weight": (hidden,),
            f"{at}hnorm.weight": (hidden if joined else None,),
            f"{'' if joined else '?'}{at}shared_head.norm.weight": (hidden,),
            f"?{at}embed_tokens.weight": (vocabulary, hidden),
            f"?{at}shared_head.head.weight": (vocabulary, hidden),
        }
        slots = [*slots_of(shapes), *_trunk_block(weights, layer, heads.num_layers, own)]
        modules.append(compare(i, layer, slots, own))
    return replace(heads, modules=modules, names=names)


def _trunk_block(
    weights: Mapping[str, WeightHeader], layer: int, num_layers: int, own: Mapping[str, WeightHeader]
) -> Iterator[Slot]:
    """Slots for the attention and feed-forward tensors of the trunk layer that shares most names with `layer`."""
    blocks: dict[int, set[str]] = {}
    for name in weights:
        if (match := _LAYER.fullmatch(name)) and match[2].startswith(("self_attn.", "mlp.")):
            blocks.setdefault(int(match[1]), set()).add(match[2])
    mine = blocks.get(layer, set())
    trunk = [block for number, block in sorted(blocks.items()) if number < num_layers]
    if trunk and any(name.startswith(f"layers.{layer}.") for name in own):
        like = max(trunk, key=lambda block: len(block & mine) / len(block | mine))
        yield from (Slot(f"layers.{layer}.{rest}", None) for rest in sorted(like))
