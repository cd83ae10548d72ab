"""Drafters that are checkpoints of their own: what they hold, and whether they (or native heads) fit a target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint
from headstart.formats.mtp_families import MOST_MODULES, Layout, find_family, sizes_of, symbols
from headstart.formats.symbols import Sizes, as_size, lookup, text_config
from headstart.tools.inspect.findings import Finding, note, warning
from headstart.tools.inspect.heads import Heads, Module, compare
from headstart.tools.inspect.state import HeadState, shape_text, tensors
from headstart.tools.inspect.weights import Weight

Scalar = int | str | list[int] | None


@dataclass(frozen=True)
class Check:
    """One thing that a drafter and its target must agree on."""

    what: str
    drafter: Scalar
    target: Scalar
    ok: bool


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

    def document(self) -> dict[str, Any]:
        sizes = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in ("layout", "modules")}
        return {**sizes, "modules": [asdict(module) for module in self.modules]}


def describe_drafter(checkpoint: Checkpoint, weights: Mapping[str, Weight], layout: Layout) -> Drafter:
    """A drafter whose config was recognized as `layout`."""
    config = checkpoint.config
    if layout.requires:
        return _own(config, layout)
    sizes = layout.sizes(config)
    names = {layout.canonical(name): weight.shape for name, weight in weights.items()}
    count = max((as_size(lookup(sizes.config, key)) or 0 for key in layout.count), default=0) or 1
    if count > MOST_MODULES:
        raise ModelError(f"{checkpoint.name}: config.json asks for {count} layers or heads of a {layout.title} drafter")
    slots = [list(layout.expected(sizes, index, index, names)) for index in range(count)]
    mask, verifier = names.get("t2d"), lookup(config, "speculators_config.verifier.name_or_path")
    return Drafter(
        layout=layout,
        kind=layout.key,
        title=layout.title,
        hidden_size=sizes.value("H"),
        target_hidden_size=sizes.value("TH") if layout.aux is None else _target_width(sizes, names),
        vocab_size=(mask[0] if mask else None) or sizes.value("V"),
        draft_vocab_size=sizes.value("DV"),
        aux_layers=_aux_layers(sizes),
        num_modules=count,
        verifier=verifier if isinstance(verifier, str) else None,
        modules=[compare(index, None, each, names) for index, each in enumerate(slots)],
    )


def _target_width(sizes: Sizes, names: Mapping[str, tuple[int, ...] | None]) -> int | None:
    """The target's hidden size, from the matrix that joins its layers where the config does not say it."""
    fusing, layers = names.get("fc.weight"), sizes.value("aux")
    if sizes.value("TH") == sizes.value("H") and fusing and len(fusing) == 2 and layers and fusing[1] % layers == 0:
        return fusing[1] // layers
    return sizes.value("TH")


def _own(config: Mapping[str, Any], layout: Layout) -> Drafter:
    """A head in headstart's own layout, whose config says it all (heads.files)."""
    tap = config.get("tap")
    return Drafter(
        layout=layout,
        kind=str(config.get("kind")),
        title=f"{config.get('kind')} head of headstart",
        hidden_size=as_size(config.get("hidden_size")),
        target_hidden_size=as_size(config.get("hidden_size")),
        vocab_size=as_size(config.get("vocab_size")),
        draft_vocab_size=None,
        aux_layers=[layer for layer in tap if isinstance(layer, int)] if isinstance(tap, list) else [],
        num_modules=as_size(config.get("num_modules")) or 1,
        verifier=str(config.get("trunk") or "") or None,
        modules=[],
    )


def _aux_layers(sizes: Sizes) -> list[int]:
    for key in symbols()["aux"]["keys"]:
        value = lookup(sizes.config, key)
        if isinstance(value, list):
            return [each for each in value if isinstance(each, int)]
    return []


def state_of_drafter(drafter: Drafter, checks: list[Check] | None) -> HeadState:
    """The state of a separate drafter, and its fit where a target was given."""
    missing = [name for module in drafter.modules for name in module.missing]
    wrong = [each for module in drafter.modules for each in module.wrong_shape]
    if drafter.modules and not any(module.found for module in drafter.modules):
        return HeadState("stripped", f"no tensor of the {drafter.title} drafter is there", "download the drafter again")
    if missing:
        reason = f"{tensors(len(missing))} missing of this {drafter.title} drafter, such as {missing[0]}"
        return HeadState("partial", reason, "download the drafter again")
    if wrong:
        first = wrong[0]
        shapes = f"{first.name} is {list(first.shape)}, not {shape_text(first.expected)}"
        reason = f"{tensors(len(wrong))} of another shape than config.json asks for: {shapes}"
        return HeadState("mismatch", reason, "use the config.json that was published with these weights")
    for check in checks or ():
        if not check.ok:
            reason = f"does not fit the target: {check.what} {check.drafter}, but the target has {check.target}"
            return HeadState("mismatch", reason, "use the drafter made for this target")
    fit = ", and it fits the target" if checks else ""
    if not drafter.modules:
        return HeadState("alive", f"a {drafter.title}; its tensors are checked when it is loaded{fit}")
    return HeadState("alive", f"all tensors of this {drafter.title} drafter are there{fit}")


def check_fit(drafter: Drafter, config: Mapping[str, Any], target: Checkpoint) -> list[Check]:
    """Does a separate drafter with this config fit a target?"""
    sizes = sizes_of(target.config)
    layers, vocabulary = sizes.value("N"), sizes.value("V")
    checks = [_equal("hidden size", drafter.target_hidden_size, sizes.value("H"))]
    checks.append(_equal("vocabulary", drafter.vocab_size, vocabulary))
    if drafter.draft_vocab_size and vocabulary:
        enough = drafter.draft_vocab_size <= vocabulary
        checks.append(Check("draft vocabulary", drafter.draft_vocab_size, vocabulary, enough))
    if drafter.aux_layers and layers:
        last = layers if drafter.layout.aux == "input" else layers - 1
        within = all(0 <= layer <= last for layer in drafter.aux_layers)
        checks.append(Check("layers read", drafter.aux_layers, layers, within))
    wanted = lookup(config, "speculators_config.verifier.architectures")
    if isinstance(wanted, list) and wanted and isinstance(own := target.config.get("architectures"), list):
        checks.append(Check("architecture", str(wanted[0]), str(own[0]) if own else None, bool({*wanted} & {*own})))
    if family := drafter.layout.targets:
        kind = str(target.config.get("model_type"))
        checks.append(Check("family", family, kind, kind.startswith(family)))
    return [check for check in checks if check.target is not None and check.drafter is not None]


def _equal(what: str, drafter: int | None, target: int | None) -> Check:
    return Check(what, drafter, target, drafter == target)


def check_native(
    heads: Heads, weights: Mapping[str, Weight], config: Mapping[str, Any], target: Checkpoint
) -> list[Check]:
    """Do the native heads of one checkpoint fit another one's trunk, as for a graft?"""
    if not heads.names:
        return [Check("MTP modules", 0, "one or more", False)]
    own, other = sizes_of(config), sizes_of(target.config)
    checks = [_equal("hidden size", own.value("H"), other.value("H"))]
    checks.append(_equal("vocabulary", own.value("V"), other.value("V")))
    family = find_family(target.config, target.format)
    if heads.family is not None and target.format == "safetensors":
        checks.append(Check("family", heads.family.key, family.key if family else None, family is heads.family))
        checks += _shape_checks(heads, weights, target)
    return [check for check in checks if check.drafter is not None]


def _shape_checks(heads: Heads, weights: Mapping[str, Weight], target: Checkpoint) -> Iterator[Check]:
    """Tensors of other shapes than the target's config asks for."""
    if heads.family is None:
        return
    sizes = heads.family.sizes(target.config)
    names = {short: weights[name].shape for short, name in heads.names.items()}
    for module in heads.modules:
        slots = list(heads.family.expected(sizes, module.index, module.layer or 0, names))
        for wrong in compare(module.index, module.layer, slots, names).wrong_shape:
            yield Check(wrong.name, list(wrong.shape), shape_text(wrong.expected), False)


def drafter_findings(config: Mapping[str, Any], target: Checkpoint | None) -> Iterator[Finding]:
    """What of the target's rope does not reach a separate drafter."""
    if target is None:
        return
    own, other = text_config(config), text_config(target.config)
    if other.get("rope_scaling") and not own.get("rope_scaling") and not own.get("rope_parameters"):
        yield warning("rope", "the target's rope_scaling does not reach the drafter: long contexts draft badly")
    length, wanted = as_size(own.get("max_position_embeddings")), as_size(other.get("max_position_embeddings"))
    if length and wanted and length < wanted:
        text = f"the drafter was made for {length} positions, the target for {wanted}: beyond that, drafts are worse"
        yield note("rope", text)
