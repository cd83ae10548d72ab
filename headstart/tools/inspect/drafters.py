"""Drafters that are checkpoints of their own: which tensors they should have, against those that are there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headstart.errors import HeadstartError, ModelError
from headstart.formats.base import Checkpoint
from headstart.formats.mtp_families import MOST_MODULES, Layout, Slot, families_by_key, find_family
from headstart.formats.symbols import Sizes, as_size, lookup, text_config
from headstart.tools.inspect.faults import Fault, aux_layers, faults
from headstart.tools.inspect.heads import Module, alike, compare
from headstart.tools.inspect.state import Check, HeadState, shape_text, some, tensors, unchecked
from headstart.tools.inspect.weights import Weight

EXPORTED = "_mtp"
"""How the model_type of a module that was cut out for xLLM ends."""
_LAYER = re.compile(r"^(?:layers|mtp)\.\d+\.")
_RENAMED = {"norm.weight": "shared_head.norm.weight", "shared_head.head.weight": "lm_head.weight"}
"""Of a module that was cut out with all that a model of its own needs."""


@dataclass(frozen=True)
class Drafter:
    """A separate drafter. Sizes are None where its config does not say them."""

    layout: Layout
    kind: str
    title: str
    hidden_size: int | None
    target_hidden_size: int | None
    vocab_size: int | None
    draft_vocab_size: int | None
    aux_layers: list[int]
    num_modules: int
    verifier: str | None
    modules: list[Module]
    faults: list[Fault]
    num_tensors: int

    def document(self) -> dict[str, Any]:
        hidden = ("layout", "modules", "faults", "num_tensors")
        sizes = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in hidden}
        return {**sizes, "modules": [asdict(module) for module in self.modules]}


def describe_drafter(checkpoint: Checkpoint, weights: Mapping[str, Weight], layout: Layout) -> Drafter:
    """A drafter whose config was recognized as `layout`."""
    config = checkpoint.config
    if layout.requires:
        return _own(checkpoint, weights, layout)
    sizes = layout.sizes(config)
    names = {layout.canonical(name): weight for name, weight in weights.items()}
    count = max((as_size(lookup(sizes.config, key)) or 0 for key in layout.count), default=0) or 1
    if count > MOST_MODULES:
        raise ModelError(f"{checkpoint.name}: config.json asks for {count} layers or heads of a {layout.title} drafter")
    slots, present = _slots(layout, sizes, config, count, names)
    alike(slots, present)
    mask, verifier = names.get("t2d"), lookup(config, "speculators_config.verifier.name_or_path")
    return Drafter(
        layout=layout,
        kind=layout.key,
        title=layout.title,
        hidden_size=sizes.value("H"),
        target_hidden_size=sizes.value("TH") if layout.aux is None else _target_width(sizes, names),
        vocab_size=(mask.shape[0] if mask and mask.shape else None) or sizes.value("V"),
        draft_vocab_size=sizes.value("DV"),
        aux_layers=aux_layers(sizes),
        num_modules=count,
        verifier=verifier if isinstance(verifier, str) else None,
        modules=[compare(index, None, each, present) for index, each in enumerate(slots)],
        faults=list(faults(checkpoint, layout, sizes)),
        num_tensors=len(weights),
    )


Slots = tuple[list[list[Slot]], Mapping[str, Weight]]
"""What each module should have, and what is there, under the same names."""


def _slots(layout: Layout, sizes: Sizes, config: Mapping[str, Any], count: int, names: Mapping[str, Weight]) -> Slots:
    if layout.cut and (family := _cut_from(config)) is not None:
        return _of_cut(family, config, names)
    every = [list(layout.expected(sizes, index, index, names)) for index in range(count)]
    inner = find_family(text_config(config)) if layout.family_block else None
    if inner is not None:
        ours, theirs = "mtp.layers.0.", "mtp_layers.0."
        there = {name.replace(theirs, ours) for name in names}
        block = [each for each in inner.expected(inner.sizes(config), 0, 0, there) if each.name.startswith(ours)]
        every[0] += [each._replace(name=each.name.replace(ours, theirs)) for each in block]
    return every, names


def _cut_from(config: Mapping[str, Any]) -> Layout | None:
    """The family of a model whose module was cut out."""
    kind = str(config.get("model_type")).removesuffix(EXPORTED)
    return next((each for each in families_by_key().values() if kind in each.model_types and not each.requires), None)


def _of_cut(family: Layout, config: Mapping[str, Any], names: Mapping[str, Weight]) -> Slots:
    """A family's own tensors without the number of their layer. Qwen's modules take the trunk's embedding and LM head
    along."""
    present = {_short(name): weight for name, weight in names.items()}
    there = {*names, *(f"{prefix}.0.{name}" for name in present for prefix in ("layers", "mtp"))}
    sizes = family.sizes(config)
    slots = [each._replace(name=_short(each.name)) for each in family.expected(sizes, 0, 0, there)]
    if any(each.name == "mtp.fc.weight" for each in slots):
        tied = bool(sizes.config.get("tie_word_embeddings") or config.get("tie_word_embeddings"))
        dims = sizes.shape(("V", "H"))
        slots += [Slot("embed_tokens.weight", dims, False), Slot("lm_head.weight", dims, tied)]
    return [slots], present


def _short(name: str) -> str:
    name = _LAYER.sub("", name)
    return _RENAMED.get(name, name)


def _target_width(sizes: Sizes, names: Mapping[str, Weight]) -> int | None:
    """The target's hidden size, from the matrix that joins its layers where the config does not say it."""
    fusing, layers = names.get("fc.weight"), sizes.value("aux")
    shape = fusing.shape if fusing else None
    if sizes.value("TH") == sizes.value("H") and shape and len(shape) == 2 and layers and shape[1] % layers == 0:
        return shape[1] // layers
    return sizes.value("TH")


def _own(checkpoint: Checkpoint, weights: Mapping[str, Weight], layout: Layout) -> Drafter:
    """A head in headstart's own layout. Raises ModelError for a damaged one."""
    from headstart.heads.files import spec_of  # it needs more than headers do
    from headstart.heads.kind import head_kind

    config = checkpoint.config
    spec, tap = spec_of(config, weights, checkpoint.path), config.get("tap")
    hidden, vocabulary = as_size(config.get("hidden_size")), as_size(config.get("vocab_size"))
    try:
        shapes = head_kind(spec.kind).shapes(spec, hidden or 0)
    except (HeadstartError, AssertionError, ArithmeticError) as error:
        raise ModelError(f"{checkpoint.name}: config.json describes no {spec.kind} head") from error
    slots = [Slot(name, shape, False) for name, shape in shapes.items()]
    slots += [Slot("draft_token_ids", ("?ids",), True), Slot("lm_head.weight", ("?ids", hidden), True)]
    return Drafter(
        layout=layout,
        kind=spec.kind,
        title=f"{spec.kind} head of headstart",
        hidden_size=hidden,
        target_hidden_size=hidden,
        vocab_size=vocabulary,
        draft_vocab_size=None,
        aux_layers=[layer for layer in tap if isinstance(layer, int)] if isinstance(tap, list) else [],
        num_modules=spec.num_modules,
        verifier=str(config.get("trunk") or "") or None,
        modules=[compare(0, None, slots, weights)],
        faults=list(faults(checkpoint, layout, layout.sizes(config))),
        num_tensors=len(weights),
    )


def state_of_drafter(drafter: Drafter, checks: list[Check] | None) -> HeadState:
    """The state of a separate drafter, and its fit where a target was given."""
    again = "download the drafter again"
    if not drafter.num_tensors:
        return unchecked(f"config.json is of this kind: {drafter.title}")
    missing = [name for module in drafter.modules for name in module.missing]
    missing += [each.text for each in drafter.faults if each.missing]
    wrong = [each for module in drafter.modules for each in module.wrong_shape]
    unusable = [why for module in drafter.modules for why in module.unusable]
    if not any(module.found for module in drafter.modules):
        return HeadState("stripped", f"no tensor of the {drafter.title} drafter is there", again)
    if missing:
        return HeadState("partial", f"{tensors(len(missing))} missing of this {drafter.title}: {some(missing)}", again)
    if wrong:
        first = wrong[0]
        shapes = f"{first.name} is {list(first.shape)}, not {shape_text(first.expected)}"
        reason = f"{tensors(len(wrong))} of another shape than config.json asks for: {shapes}"
        return HeadState("mismatch", reason, "use the config.json that was published with these weights")
    if unusable:
        return HeadState("partial", some(unusable), again)
    if drafter.faults:
        reason = "; ".join(each.text for each in drafter.faults)
        return HeadState("mismatch", reason, "use the config.json that was published with these weights")
    for check in checks or ():
        if not check.ok:
            reason = f"does not fit the target: {check.what} {check.drafter}, but the target has {check.target}"
            return HeadState("mismatch", reason, "use the drafter made for this target")
    fit = ", and it fits the target" if checks else ""
    return HeadState("alive", f"all tensors of this {drafter.title} drafter are there{fit}")
