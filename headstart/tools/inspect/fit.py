"""Checks whether a separate drafter, native heads (for a graft) or a draft model fit a target model."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from headstart.errors import ModelError
from headstart.formats.adapter import CONFIG as ADAPTER_CONFIG, read_adapter
from headstart.formats.base import Checkpoint
from headstart.formats.sizes import Sizes, as_size, has_scaled_rope, lookup, text_config
from headstart.heads.draft_model import MASK_KEYS
from headstart.models.families import find_mtp_family
from headstart.models.head_state import shape_text
from headstart.models.native_heads import NativeHeads, examine
from headstart.tools.inspect.adapter import misfit
from headstart.tools.inspect.drafters import DrafterReport, FitCheck
from headstart.tools.inspect.findings import Finding, note, warning


def check_fit(drafter: DrafterReport, config: Mapping[str, Any], target: Checkpoint) -> list[FitCheck]:
    sizes = Sizes(target.config)
    layers, vocabulary = sizes.get("layers"), sizes.get("vocabulary")
    checks = [_equal("hidden size", drafter.target_hidden_size, sizes.get("hidden"))]
    checks.append(_equal("vocabulary", drafter.vocab_size, vocabulary))
    if drafter.draft_vocab_size and vocabulary:
        enough = drafter.draft_vocab_size <= vocabulary
        checks.append(FitCheck("draft vocabulary", drafter.draft_vocab_size, vocabulary, enough))
    if drafter.aux_layers and layers:
        last = layers if drafter.format.aux == "input" else layers - 1
        within = all(0 <= layer <= last for layer in drafter.aux_layers)
        checks.append(FitCheck("layers read", drafter.aux_layers, layers, within))
    wanted = lookup(config, "speculators_config.verifier.architectures")
    if isinstance(wanted, list) and wanted and isinstance(own := target.config.get("architectures"), list):
        checks.append(FitCheck("architecture", str(wanted[0]), str(own[0]) if own else None, bool({*wanted} & {*own})))
    if family := drafter.format.targets:
        kind = str(target.config.get("model_type"))
        checks.append(FitCheck("family", family, kind, kind.startswith(family)))
    return [check for check in checks if check.target is not None and check.drafter is not None]


def _equal(what: str, drafter: int | None, target: int | None) -> FitCheck:
    return FitCheck(what, drafter, target, drafter == target)


def check_native(heads: NativeHeads, checkpoint: Checkpoint, target: Checkpoint) -> list[FitCheck]:
    """Checks whether the native heads of one checkpoint fit another one's trunk, as for a graft."""
    own, other = Sizes(checkpoint.config), Sizes(target.config)
    checks = [_equal("hidden size", own.get("hidden"), other.get("hidden"))]
    checks.append(_equal("vocabulary", own.get("vocabulary"), other.get("vocabulary")))
    family = find_mtp_family(target.config, from_gguf=target.format == "gguf")
    if heads.found is not None and target.format == "safetensors":
        same = family is not None and family.key == heads.found.key
        checks.append(FitCheck("family", heads.found.key, family.key if family else None, same))
        checks += _shape_checks(checkpoint, target)
    return [check for check in checks if check.drafter is not None]


def check_whole(checkpoint: Checkpoint, target: Checkpoint) -> list[FitCheck]:
    """Checks whether a model without heads can be the draft model: same vocabulary, and smaller. If it is not smaller,
    checks an adapter beside its weights."""
    own, other = (sum(tensor.nbytes for tensor in each.tensors.values()) for each in (checkpoint, target))
    if own >= other and (checkpoint.path / ADAPTER_CONFIG).exists():
        why = misfit(read_adapter(checkpoint.path), target)
        return [FitCheck("LoRA adapter beside the weights", checkpoint.name, why or target.name, not why)]
    if own >= other:
        return [FitCheck("MTP modules", 0, "one or more", False)]
    from headstart.engine.matching import match  # it needs more than headers do

    sizes = [Sizes(each.config).get("vocabulary") or 0 for each in (target, checkpoint)]
    fits = sizes[0] == sizes[1]
    with suppress(ModelError):  # some checkpoints have no tokenizer
        ours, theirs = (each.load_tokenizer() for each in (target, checkpoint))
        fits = False
        by_token = any(checkpoint.config.get(key) is not None for key in MASK_KEYS)
        match(ours, theirs, (sizes[0], sizes[1]), (target.name, checkpoint.name), by_token=by_token)
        fits = True
    return [FitCheck("vocabulary, as a draft model", sizes[1], sizes[0], fits)]


def _shape_checks(checkpoint: Checkpoint, target: Checkpoint) -> Iterator[FitCheck]:
    """Yields a failed check for each tensor of the heads whose shape does not match the target's config."""
    for module in examine(replace(checkpoint, config=target.config)).modules:
        for wrong in module.wrong_shape:
            yield FitCheck(wrong.name, list(wrong.shape), shape_text(wrong.expected), False)


def drafter_findings(config: Mapping[str, Any], target: Checkpoint | None) -> Iterator[Finding]:
    """Yields remarks on RoPE settings of the target that a separate drafter lacks."""
    if target is None:
        return
    own, other = text_config(config), text_config(target.config)
    if has_scaled_rope(other) and not has_scaled_rope(own):
        yield warning("rope", "the target's rope_scaling does not reach the drafter: long contexts draft badly")
    length, wanted = as_size(own.get("max_position_embeddings")), as_size(other.get("max_position_embeddings"))
    if length and wanted and length < wanted:
        text = f"the drafter was made for {length} positions, the target for {wanted}: beyond that, drafts are worse"
        yield note("rope", text)
