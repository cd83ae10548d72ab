"""Finds model families by `model_type`: those that run (a file each, models/<model_type>.py) and those that are only
described (described.py); reads any config.json by the family it names."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from headstart import registry
from headstart.errors import ModelError, did_you_mean
from headstart.formats.sizes import text_config
from headstart.layers.build import DecoderConfig
from headstart.models.base import Family
from headstart.models.described_mtp import LAYOUTS
from headstart.models.mtp import MTPLayout
from headstart.wording import option

DRAFTS: Mapping[str, str] = {
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "name that model, and this one with " + option("head")
    ),
    "gemma4-assistant": "name that model, and the safetensors of this one with " + option("head"),
}
"""model_type of a drafter that is no model by itself -> the hint of the error."""
SIZE_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


def family_named(model_type: str, launch: str = "vllm MODEL") -> Family:
    """The family that runs `model_type`: the file of that name, or the family that declares it as an alias. Raises
    ModelError; for a described family the error names the missing feature, and `headstart launch` with the arguments
    `launch`."""
    if (found := _runnable(model_type)) is not None:
        return found[1]
    if hint := DRAFTS.get(model_type):
        raise ModelError(f"{model_type} is no model by itself: it reads the keys of the one that it drafts for", hint)
    if (described := _described(model_type)) is not None:
        what = f"{model_type} models need {described[1].unsupported}, which is not supported"
        raise ModelError(what, f"another engine has it: headstart launch {launch}")
    near = did_you_mean(model_type.replace("-", "_"), registry.available("models"))
    hint = f"{near} docs/support.md lists all; another engine may have it: headstart launch {launch}"
    raise ModelError(f"unknown model family {model_type!r}", hint.lstrip())


def is_known(model_type: str) -> bool:
    """True if the engine can run `model_type`."""
    return _runnable(model_type) is not None


def known_family(model_type: object) -> Family | None:
    """The family of `model_type`, whether it runs or is only described; None for an unknown one."""
    found = (_runnable(model_type) or _described(model_type)) if isinstance(model_type, str) else None
    return found[1] if found else None


def all_families() -> dict[str, Family]:
    """Every family by its model_type: those that run, then those that are only described. Imports all of them."""
    runnable = {name: registry.find("models", name).FAMILY for name in registry.available("models")}
    return runnable | {**_described_families()}


class FoundFamily(NamedTuple):
    """A family with MTP modules."""

    key: str  # the family's name in reports
    family: Family
    layout: MTPLayout


def find_mtp_family(config: Mapping[str, Any], *, from_gguf: bool = False) -> FoundFamily | None:
    """The family of a config.json, or of GGUF metadata as such a config, if it may have MTP modules; else None."""
    kinds = [config.get("model_type"), *([] if from_gguf else [text_config(config).get("model_type")])]
    for kind in dict.fromkeys(each for each in kinds if isinstance(each, str) and each):
        if not (found := _runnable(kind) or _described(kind)):
            continue
        key, family = found
        layout = family.layout(config)
        if layout and layout.serves(config):
            return FoundFamily(layout.key or key, family, layout)
    listed = config.get("architectures")
    written = " ".join(map(str, listed)).lower() if isinstance(listed, list) and not from_gguf else ""
    for key, layout in LAYOUTS.items():
        if any(word in written for word in layout.architectures):
            return FoundFamily(layout.key or key, _described_families()[key], layout)
    return None


def mtp_families() -> dict[str, MTPLayout]:
    """The family's name in reports -> its MTP layout, for all families. Imports all families."""
    families = reversed(all_families().items())  # if two families have the same name, the one that runs is kept
    found = {each.key or name: each for name, family in families for each in (family.mtp, *family.variants) if each}
    return dict(sorted(found.items()))


def _runnable(model_type: str) -> tuple[str, Family] | None:
    """(name, family) that runs a model type; None if there is none. Tries families with similar names first, so that
    few files are imported."""
    if registry.is_available("models", model_type):
        return model_type, registry.find("models", model_type).FAMILY
    for name in sorted(registry.available("models"), key=lambda name: (not model_type.startswith(name), -len(name))):
        family: Family = registry.find("models", name).FAMILY
        if model_type in family.aliases:
            return name, family
    return None


def _described(model_type: str) -> tuple[str, Family] | None:
    return next((each for each in _described_families().items() if model_type in (each[0], *each[1].aliases)), None)


def _described_families() -> Mapping[str, Family]:
    from headstart.models.described import DESCRIBED  # models that run do not need it

    return DESCRIBED


def read_any(config: Mapping[str, Any]) -> tuple[Family, DecoderConfig, str]:
    """(family, sizes and layers, note) of any config.json, wrappers included. A config of an unknown family, or of a
    variant that its family refuses, is read by the keys that most families share, and the note says so (else it is
    empty). Raises ModelError for missing or impossible sizes."""
    text, note = text_config(config), ""
    for model_type in (config.get("model_type"), text.get("model_type")):
        if (family := known_family(model_type)) is None:
            continue
        try:
            return family, family.read({**text, "model_type": model_type}, strict=False), note
        except ModelError as error:
            note = f"read by the keys that most families share: {error.message}"
    if not note and text.get("model_type"):
        note = f"read by the keys that most families share: {text['model_type']} is not a known family"
    from headstart.models.described import UNKNOWN

    return UNKNOWN, UNKNOWN.read(text, strict=False), note


def with_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """A text model's config, with its family's default sizes for missing keys."""
    family = known_family(config.get("model_type"))
    defaults = family.defaults if family else {}
    return {key: defaults[key] for key in SIZE_KEYS if key in defaults} | dict(config)
