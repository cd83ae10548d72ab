"""Do heads fit a target? A drafter beside it, or native heads that are to be put into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint
from headstart.formats.mtp_families import find_family, sizes_of
from headstart.formats.symbols import as_size, lookup, text_config
from headstart.tools.inspect.drafters import Drafter
from headstart.tools.inspect.findings import Finding, note, warning
from headstart.tools.inspect.heads import Heads, compare
from headstart.tools.inspect.state import Check, shape_text
from headstart.tools.inspect.weights import Weight


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
    own, other = sizes_of(config), sizes_of(target.config)
    checks = [_equal("hidden size", own.value("H"), other.value("H"))]
    checks.append(_equal("vocabulary", own.value("V"), other.value("V")))
    family = find_family(target.config, target.format)
    if heads.family is not None and target.format == "safetensors":
        checks.append(Check("family", heads.family.key, family.key if family else None, family is heads.family))
        checks += _shape_checks(heads, weights, target)
    return [check for check in checks if check.drafter is not None]


def check_whole(checkpoint: Checkpoint, target: Checkpoint) -> list[Check]:
    """Can a model without heads be the draft model of a target? It must say the same tokens, and be smaller."""
    own, other = (sum(tensor.nbytes for tensor in each.tensors.values()) for each in (checkpoint, target))
    if own >= other:
        return [Check("MTP modules", 0, "one or more", False)]
    from headstart.engine.draft_model import match  # it needs more than headers do

    sizes = [sizes_of(each.config).value("V") or 0 for each in (target, checkpoint)]
    fits = sizes[0] == sizes[1]
    with suppress(ModelError):  # headers alone have no tokenizer
        ours, theirs = (each.load_tokenizer().vocabulary() for each in (target, checkpoint))
        fits = False
        match(ours, theirs, (sizes[0], sizes[1]), (target.name, checkpoint.name))
        fits = True
    return [Check("vocabulary, as a draft model", sizes[1], sizes[0], fits)]


def _shape_checks(heads: Heads, weights: Mapping[str, Weight], target: Checkpoint) -> Iterator[Check]:
    """Tensors of other shapes than the target's config asks for."""
    if heads.family is None:
        return
    sizes = heads.family.sizes(target.config)
    names = {short: weights[name] for short, name in heads.names.items()}
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
