"""Separate drafter checkpoints: compares the expected tensors with those that are present."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from headstart.errors import HeadstartError, ModelError
from headstart.formats.base import Checkpoint, Tensor, strip_wrapper
from headstart.formats.quantization import WeightHeader
from headstart.formats.sizes import SIZE_KEYS, Sizes, as_size, lookup
from headstart.heads import eagle3
from headstart.heads.base import MAX_MODULES
from headstart.heads.layouts import reading
from headstart.heads.published import OWN, DrafterFormat
from headstart.models.expected import ModuleCheck, Slot, compare, require_alike, slots_of
from headstart.models.families import find_mtp_family
from headstart.models.head_state import HeadState, shape_text, some, tensors, unchecked
from headstart.models.native_heads import check_separate_module

MASK_KEYS = ("dflash_config.mask_token_id", *dict.fromkeys((*reading.MASK_KEYS, *eagle3.MASK_KEYS)))
"""Config keys of a block drafter's mask token, which stands for a token to be drafted."""


class Fault(NamedTuple):
    """A defect of a drafter beyond missing or misshapen module tensors."""

    text: str
    missing: bool = False  # true: `text` names a missing tensor


def faults(checkpoint: Checkpoint, published: DrafterFormat, sizes: Sizes) -> Iterator[Fault]:
    """Yields all defects of vocabulary maps, mask tokens and layer ids. Raises ModelError for a truncated file."""
    tensors = {published.canonical(name): tensor for name, tensor in checkpoint.tensors.items()}
    whole, draft = sizes.get("vocabulary"), sizes.get("draft_vocabulary")
    reduced = published.reduced and whole and draft and draft < whole
    if reduced and "d2t" not in tensors:
        yield Fault("d2t (the draft vocabulary's tokens)", missing=True)
    if whole and draft and draft > whole:
        yield Fault(f"the draft vocabulary has {draft} tokens, the target's {whole}")
    if "d2t" in tensors and whole:
        yield from _map_faults(tensors["d2t"], tensors.get("t2d"), whole)
    if (ids := tensors.get("draft_token_ids")) and ids.here and len(ids.shape) == 1 and ids.dtype in ("I64", "I32"):
        tokens = ids.numpy().astype(np.int64)
        if len(tokens) and ((np.diff(tokens) <= 0).any() or tokens[0] < 0 or tokens[-1] >= (whole or tokens[-1] + 1)):
            yield Fault("draft_token_ids must be ascending tokens of the vocabulary")
    yield from _mask_faults(published, sizes, whole)
    listed = aux_layers(sizes)
    if any(layer < 0 for layer in listed) or len({*listed}) < len(listed):
        yield Fault(f"the layers that it reads are {listed}: ids must be distinct and not negative")


def aux_layers(sizes: Sizes) -> list[int]:
    for key in SIZE_KEYS["taps"]:
        value = lookup(sizes.config, key)
        if isinstance(value, list):
            return [each for each in value if isinstance(each, int)]
    return []


def _map_faults(d2t: Tensor, t2d: Tensor | None, whole: int) -> Iterator[Fault]:
    """Yields defects of a draft vocabulary. d2t [draft vocabulary]: target id minus draft id; t2d [vocabulary]: whether
    the draft vocabulary has the token."""
    if not d2t.here or len(d2t.shape) != 1 or d2t.dtype not in ("I64", "I32"):
        return
    try:
        ids = d2t.numpy().astype(np.int64) + np.arange(d2t.shape[0])
        mask = t2d.numpy() if t2d is not None and t2d.here and t2d.dtype == "BOOL" else None
    except ModelError as error:
        yield Fault(error.message)
        return
    if len(ids) and (ids.min() < 0 or ids.max() >= whole):
        yield Fault(f"d2t maps to token {ids.max() if ids.max() >= whole else ids.min()} of {whole}")
    elif len(np.unique(ids)) < len(ids):
        yield Fault("d2t maps two draft tokens to the same token")
    elif mask is not None and mask.shape == (whole,) and not (mask[ids].all() and mask.sum() == len(ids)):
        yield Fault("t2d and d2t are of different draft vocabularies")


def _mask_faults(published: DrafterFormat, sizes: Sizes, whole: int | None) -> Iterator[Fault]:
    for key in MASK_KEYS if published.block else ():
        value = lookup(sizes.config, key)
        if value is not None and not (_is_id(value) and (whole is None or value < whole)):
            yield Fault(f"{key} is {value!r}, but the vocabulary has {whole} tokens")
    for key in published.block:
        value = lookup(sizes.config, key)
        if value is not None and not (_is_id(value) and value > 0):
            yield Fault(f"{key} is {value!r}, not a number of tokens")


def _is_id(value: object) -> bool:
    return not isinstance(value, list) and as_size(value) is not None


EXPORTED = "_mtp"  # suffix of the model_type of a module exported for xLLM
_LAYER = re.compile(r"^(?:layers|mtp)\.\d+\.")
_RENAMED = {"norm.weight": "shared_head.norm.weight", "shared_head.head.weight": "lm_head.weight"}
"""Tensor name in a module exported as a model of its own -> name in the whole model."""
_SPECULATORS = {
    "mtp_layers.0.input_proj.": "mtp.fc.", "mtp_layers.0.token_layernorm.": "mtp.pre_fc_norm_embedding.",
    "mtp_layers.0.hidden_layernorm.": "mtp.pre_fc_norm_hidden.", "mtp_layers.0.final_layernorm.": "mtp.norm.",
    "mtp_layers.0.": "mtp.layers.0.",
}  # fmt: skip
"""Prefix of tensor names in speculators' MTP modules -> Qwen's prefix."""
Scalar = int | str | list[int] | None


@dataclass(frozen=True)
class FitCheck:
    """A value that must match between a drafter and its target."""

    what: str
    drafter: Scalar
    target: Scalar
    ok: bool


@dataclass(frozen=True)
class DrafterReport:
    """A separate drafter checkpoint. A size is None if the config does not give it."""

    format: DrafterFormat
    kind: str
    title: str
    hidden_size: int | None
    target_hidden_size: int | None
    vocab_size: int | None
    draft_vocab_size: int | None
    aux_layers: list[int]
    num_modules: int
    verifier: str | None
    modules: list[ModuleCheck]
    faults: list[Fault]
    num_tensors: int

    def document(self) -> dict[str, Any]:
        hidden = ("format", "modules", "faults", "num_tensors")
        sizes = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in hidden}
        return {**sizes, "modules": [asdict(module) for module in self.modules]}


def describe_drafter(
    checkpoint: Checkpoint, weights: Mapping[str, WeightHeader], published: DrafterFormat
) -> DrafterReport:
    if published is OWN:
        return _own(checkpoint, weights)
    sizes = Sizes(checkpoint.config)
    names = {published.canonical(name): weight for name, weight in weights.items()}
    count = published.num_parts(sizes)
    if count > MAX_MODULES:
        asked = f"{count} layers or heads of a {published.title} drafter"
        raise ModelError(f"{checkpoint.name}: config.json asks for {asked}")
    mask, verifier = names.get("t2d"), lookup(checkpoint.config, "speculators_config.verifier.name_or_path")
    return DrafterReport(
        format=published, kind=published.key, title=published.title, hidden_size=sizes.get("hidden"),
        target_hidden_size=_target_width(sizes, names) if published.aux else sizes.get("target_hidden"),
        vocab_size=(mask.shape[0] if mask and mask.shape else None) or sizes.get("vocabulary"),
        draft_vocab_size=sizes.get("draft_vocabulary"), aux_layers=aux_layers(sizes), num_modules=count,
        verifier=verifier if isinstance(verifier, str) else None,
        modules=_of_family(published, checkpoint.config, names) or _compared(published, sizes, count, names),
        faults=list(faults(checkpoint, published, sizes)), num_tensors=len(weights),
    )  # fmt: skip


def _compared(
    published: DrafterFormat, sizes: Sizes, count: int, names: Mapping[str, WeightHeader]
) -> list[ModuleCheck]:
    slots = [list(slots_of(published.tensors(sizes, index, names))) for index in range(count)]
    require_alike(slots, names)
    return [compare(index, None, each, names) for index, each in enumerate(slots)]


def _of_family(
    published: DrafterFormat, config: Mapping[str, Any], names: Mapping[str, WeightHeader]
) -> list[ModuleCheck]:
    """Checks a family's MTP module without a trunk against the tensors of that family. Empty if no family is known."""
    kind = str(config.get("model_type")).removesuffix(EXPORTED)
    inner = {**config, "model_type": kind} if published.of_family == "module" else config
    found = find_mtp_family(inner) if published.of_family else None
    if found is None or found.layout.tensors:
        return []
    trailing = not found.family.names.of_modules
    layer = f"layers.{Sizes(config).get('layers') or 0}." if trailing else "mtp.0."
    long = {_with_trunk(name, published.of_family, layer, trailing=trailing): name for name in names}
    module = check_separate_module(found, inner, {new: names[name] for new, name in long.items()})
    if module is None:
        return []

    def short(name: str) -> str:
        for theirs, ours in _SPECULATORS.items() if published.of_family == "block" else ():
            if strip_wrapper(name).startswith(ours):
                return theirs + strip_wrapper(name).removeprefix(ours)
        name = _LAYER.sub("", strip_wrapper(name))
        return _RENAMED.get(name, name)

    wrong = [replace(each, name=short(each.name)) for each in module.wrong_shape]
    module = replace(module, layer=None, missing=[short(name) for name in module.missing], wrong_shape=wrong)
    if published.of_family == "module" and "mtp.fc.weight" in {*long, *module.missing}:
        module = _with_shared(module, Sizes(config), config, names)
    return [module]


def _with_trunk(name: str, of_family: str, layer: str, *, trailing: bool) -> str:
    """Returns the name in the whole model of a separate module's tensor. `layer`: the module's prefix there."""
    if of_family == "block":
        return next((ours + name.removeprefix(own) for own, ours in _SPECULATORS.items() if name.startswith(own)), name)
    if name.startswith("layers.0."):
        return layer + name.removeprefix("layers.0.")
    return layer + _RENAMED.get(name, name) if trailing and not name.startswith("layers.") else name


def _with_shared(
    module: ModuleCheck, sizes: Sizes, config: Mapping[str, Any], names: Mapping[str, WeightHeader]
) -> ModuleCheck:
    """Adds the trunk's embedding and LM head to the check: Qwen's separate modules contain copies of both."""
    tied = bool(sizes.config.get("tie_word_embeddings") or config.get("tie_word_embeddings"))
    dims = (sizes["vocabulary"], sizes["hidden"])
    shared = compare(0, None, [Slot("embed_tokens.weight", dims), Slot("lm_head.weight", dims, tied)], names)
    return replace(
        module, found=module.found + shared.found, required=module.required + shared.required,
        missing=module.missing + shared.missing, wrong_shape=module.wrong_shape + shared.wrong_shape,
        unusable=module.unusable + shared.unusable,
    )  # fmt: skip


def _target_width(sizes: Sizes, names: Mapping[str, WeightHeader]) -> int | None:
    """Returns the target's hidden size, if necessary from the shape of the matrix that combines its layers."""
    fusing, layers = names.get("fc.weight"), sizes["taps"]
    shape = fusing.shape if fusing else None
    own = sizes.get("target_hidden") == sizes.get("hidden")
    if own and shape and len(shape) == 2 and layers and shape[1] % layers == 0:
        return shape[1] // int(layers)
    return sizes.get("target_hidden")


def _own(checkpoint: Checkpoint, weights: Mapping[str, WeightHeader]) -> DrafterReport:
    from headstart.heads.files import spec_of  # it needs more than headers do
    from headstart.heads.kind import head_kind

    config = checkpoint.config
    spec, tap = spec_of(config, weights, checkpoint.path), config.get("tap")
    hidden, vocabulary = as_size(config.get("hidden_size")), as_size(config.get("vocab_size"))
    try:
        shapes = head_kind(spec.kind).shapes(spec, hidden or 0)
    except (HeadstartError, AssertionError, ArithmeticError) as error:
        raise ModelError(f"{checkpoint.name}: config.json does not describe a {spec.kind} head") from error
    slots = [Slot(name, shape) for name, shape in shapes.items()]
    slots += [Slot("draft_token_ids", ("?ids",), True), Slot("lm_head.weight", ("?ids", hidden), True)]
    return DrafterReport(
        format=OWN, kind=spec.kind, title=f"{spec.kind} head of headstart", hidden_size=hidden,
        target_hidden_size=hidden, vocab_size=vocabulary, draft_vocab_size=None,
        aux_layers=[layer for layer in tap if isinstance(layer, int)] if isinstance(tap, list) else [],
        num_modules=spec.num_modules, verifier=str(config.get("trunk") or "") or None,
        modules=[compare(0, None, slots, weights)], faults=list(faults(checkpoint, OWN, Sizes(config))),
        num_tensors=len(weights),
    )  # fmt: skip


def state_of_drafter(drafter: DrafterReport, checks: list[FitCheck] | None) -> HeadState:
    again = "download the drafter again"
    if not drafter.num_tensors:
        return unchecked(f"config.json describes this kind of drafter: {drafter.title}")
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
