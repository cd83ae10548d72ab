"""What kind of drafter a checkpoint is: the one place that inspect, launch, export and train ask.

    classify(config, names)       of a config.json and, where headers are at hand, names of tensors (they decide where
                                  a config says nothing, as EAGLE-1's do)
    classify_path(name)           of a directory, a .gguf file or a Hub repo (config.json, and headers only if needed)

Both give a `DrafterKind`: `kind` is a row of [drafters] in mtp_families.toml (headstart, peagle, eagle3, dspark,
dflash2, dflash, assistant, eagle, mlp_speculator, medusa, speculators_mtp, xllm_mtp) or one of OTHERS.
`method` is vLLM's word for it, which launchers map to their own: eagle, eagle3, dflash, dspark, medusa, mlp_speculator,
mtp, draft_model; `headstart` where it must be exported first, and "" for `unknown`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from headstart import hub
from headstart.errors import HeadstartError, ModelError, UsageError
from headstart.formats import find_checkpoint, gguf
from headstart.formats.gguf_file import GgufFile, read as read_gguf
from headstart.formats.json_object import read_object
from headstart.formats.mtp_families import Layout, declared, drafters_by_key, find_family, has_architecture, sizes_of
from headstart.formats.symbols import Sizes, as_size, lookup

MTP, MODEL, UNKNOWN = "mtp", "draft_model", "unknown"
OTHERS = {
    MTP: "a model with native MTP modules",
    MODEL: "a whole model without MTP modules",
    UNKNOWN: "a speculators file of an algorithm that is not known",
}


@dataclass(frozen=True, kw_only=True)
class DrafterKind:
    """A kind of drafter, and what its config says. `layout` None: no row of [drafters]. `container`: safetensors, gguf,
    or speculators, which nests the drafter's config. `num_modules`: native MTP modules, Medusa heads, or layers.
    `block`: rows that one pass of a block drafter computes, and `most_drafts`, how many tokens they are; None for
    drafters that go token by token. `hidden_size` and `vocab_size` are the target's; None where nothing says them."""

    kind: str
    method: str
    title: str
    layout: Layout | None = None
    container: str = "safetensors"
    num_modules: int = 1
    block: int | None = None
    most_drafts: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    draft_vocab_size: int | None = None

    @property
    def separate(self) -> bool:
        """Is it a checkpoint of its own, which no engine serves by itself?"""
        return self.layout is not None

    @property
    def reduced_vocabulary(self) -> bool:
        """Does it draft from a part of the target's tokens only?"""
        return bool(self.draft_vocab_size and self.vocab_size and self.draft_vocab_size < self.vocab_size)


def classify(config: Mapping[str, Any], names: Container[str] | None = None) -> DrafterKind:
    """The kind of a config.json; `names` None: of what tensors are there nothing is known. Raises ModelError for an
    absurd number of modules."""
    layout = _layout(config, names)
    if layout is not None:
        return _described(layout, config)
    algorithm = config.get("speculators_model_type")
    if algorithm is not None:
        return DrafterKind(kind=UNKNOWN, method="", title=f"speculators' {algorithm}", container="speculators")
    family = find_family(config)
    promised = declared(config, family).modules
    if promised:
        method = family.method if family else "mtp"
        title = f"{family.title if family else 'native'} MTP"
        return _whole(config, MTP, method, title, promised)
    rows = drafters_by_key().values() if names is None else ()
    if bare := next((each for each in rows if each.bare and _has(config, each.bare)), None):
        return _described(bare, config)
    return _whole(config, MODEL, "draft_model", "draft model", 1)


def _layout(config: Mapping[str, Any], names: Container[str] | None) -> Layout | None:
    rows = list(drafters_by_key().values())
    told = next((each for each in rows if _says(config, each)), None)
    if told is not None or config.get("speculators_model_type") is not None:
        return told
    for asked in (has_architecture, _has_key, lambda _, each: any(name in (names or ()) for name in each.markers)):
        if found := next((each for each in rows if asked(config, each)), None):
            return found
    return None


def _says(config: Mapping[str, Any], layout: Layout) -> bool:
    algorithm, kind = config.get("speculators_model_type"), config.get("model_type")
    if layout.requires and layout.requires in config:
        return True
    if algorithm is not None:
        return algorithm in layout.speculators
    if layout.says and _has(config, layout.says):
        return True
    patterns = (*layout.model_types, *layout.gguf)
    return isinstance(kind, str) and any(fnmatchcase(kind, pattern) for pattern in patterns)


def _has(config: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    return all(lookup(config, key) == value for key, value in values.items())


def _has_key(config: Mapping[str, Any], layout: Layout) -> bool:
    return any(config.get(key) is not None for key in layout.keys)


def _described(layout: Layout, config: Mapping[str, Any]) -> DrafterKind:
    sizes = layout.sizes(config)
    block = next((size for key in layout.block if (size := as_size(lookup(sizes.config, key)))), None)
    return DrafterKind(
        kind=layout.key,
        method=layout.method,
        title=layout.title,
        layout=layout,
        container="speculators" if config.get("speculators_model_type") is not None else "safetensors",
        num_modules=max((as_size(lookup(sizes.config, key)) or 0 for key in layout.count), default=0) or 1,
        block=block,
        most_drafts=None if block is None else max(1, block - int(_anchored(layout, sizes))),
        hidden_size=sizes.value("TH"),
        vocab_size=as_size(sizes.config.get("target_vocab_size")) or sizes.value("V"),
        draft_vocab_size=sizes.value("DV"),
    )


def _anchored(layout: Layout, sizes: Sizes) -> bool:
    """Does the first row of a block only hold the last token? `sample_from_anchor` says it where it differs."""
    told = lookup(sizes.config, "sample_from_anchor")
    return not told if isinstance(told, bool) else layout.anchored


def _whole(config: Mapping[str, Any], kind: str, method: str, title: str, modules: int) -> DrafterKind:
    """A model that is no drafter alone."""
    sizes = sizes_of(config)
    return DrafterKind(
        kind=kind,
        method=method,
        title=title,
        num_modules=modules,
        hidden_size=sizes.value("H"),
        vocab_size=sizes.value("V"),
    )


def classify_path(name: str | Path) -> DrafterKind:
    """The kind of a directory, a .gguf file or a Hub repo. Raises UsageError where nothing is there, ModelError for
    damaged files."""
    path = hub.resolve(str(name)) if hub.is_builtin(str(name)) else Path(name).expanduser()
    if gguf.detect(path):
        return of_gguf(read_gguf(path))
    if path.is_dir() and (path / "config.json").exists():
        config = read_object(path / "config.json")
        return classify(config, _names(path) if any(path.glob("*.safetensors")) else None)
    if not path.exists() and hub.is_repo(str(name)):
        kind = classify(read_object(hub.config_file(str(name))))
        with suppress(HeadstartError):  # a repo of pickles has no headers
            if kind.kind == MODEL:
                found = find_checkpoint(str(name))
                return classify(found.config, found.tensors)
        return kind
    raise UsageError(f"there is no drafter at {name}", "give a directory with config.json, a .gguf file or a repo id")


def _names(path: Path) -> Container[str] | None:
    """Names of its tensors; None where they cannot be read, which is for others to say."""
    try:
        return find_checkpoint(path).tensors
    except ModelError:
        return None


def of_gguf(file: GgufFile) -> DrafterKind:
    """The kind of a GGUF file, by its architecture and the keys that all of them share."""
    architecture = str(file.metadata.get("general.architecture", ""))

    def number(key: str) -> int | None:
        return as_size(file.metadata.get(f"{architecture}.{key}"))

    layout = next((each for each in drafters_by_key().values() if architecture in each.gguf), None)
    modules, block = number("nextn_predict_layers"), number("block_size")
    kind, method = (MTP, "mtp") if modules else (MODEL, "draft_model")
    return DrafterKind(
        kind=layout.key if layout else kind,
        method=layout.method if layout else method,
        title=layout.title if layout else OTHERS[kind],
        layout=layout,
        container="gguf",
        num_modules=(number("block_count") if layout else modules) or 1,
        block=block,
        most_drafts=max(1, block - int(layout is not None and layout.anchored)) if block else None,
        hidden_size=number("embedding_length"),
        vocab_size=number("vocab_size"),
    )
