"""Classifies a checkpoint as a drafter: a published head format, a model with native MTP modules, or a draft model.

inspect, launch, export, plan and train all use `classify` (for a config.json) or `classify_path` (for a directory, a
.gguf file or a Hub repo).
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstart import hub
from headstart.core import no_progress
from headstart.errors import ModelError, UsageError
from headstart.files import user_path
from headstart.formats import find_checkpoint, gguf
from headstart.formats.base import Checkpoint
from headstart.formats.gguf_file import GgufFile
from headstart.formats.json_object import read_object
from headstart.formats.sizes import Sizes, as_size
from headstart.heads.published import DrafterFormat, identify, identify_bare, published_formats
from headstart.models.families import find_mtp_family
from headstart.models.mtp import declared, nested_value

MTP, MODEL, UNKNOWN = "mtp", "draft_model", "unknown"
OTHERS = {
    MTP: "a model with native MTP modules",
    MODEL: "a whole model without MTP modules",
    UNKNOWN: "a speculators file with an unknown algorithm",
}


@dataclass(frozen=True, kw_only=True)
class DrafterKind:
    """A drafter's kind, with the sizes in its config."""

    kind: str  # `DrafterFormat.key`, or one of OTHERS
    method: str
    """`method` of vLLM's --speculative-config, which launchers map to their own names; `headstart` if the head must be
    exported first; empty for UNKNOWN."""
    title: str
    format: DrafterFormat | None = None  # None: one of OTHERS
    container: str = "safetensors"  # safetensors, gguf, or speculators, which nests the drafter's config
    num_modules: int = 1  # native MTP modules, Medusa heads, or layers
    block: int | None = None  # rows of one pass of a block drafter; None for other drafters
    max_drafts: int | None = None  # tokens that such a pass drafts
    hidden_size: int | None = None  # of the target; None: not in the config
    vocab_size: int | None = None  # of the target; None: not in the config
    draft_vocab_size: int | None = None

    @property
    def separate(self) -> bool:
        """True for a head in its own checkpoint, which no engine can serve without a trunk."""
        return self.format is not None

    @property
    def reduced_vocabulary(self) -> bool:
        """True if the draft vocabulary is smaller than the target's."""
        return bool(self.draft_vocab_size and self.vocab_size and self.draft_vocab_size < self.vocab_size)


def classify(config: Mapping[str, Any], names: Container[str] | None = None) -> DrafterKind:
    """The kind of a config.json. names: tensor names, used if the config is not enough; None: unknown. Raises
    ModelError for an impossible number of modules."""
    if (found := identify(config, names)) is not None:
        return _described(found, config)
    algorithm = config.get("speculators_model_type")
    if algorithm is not None:
        return DrafterKind(kind=UNKNOWN, method="", title=f"speculators' {algorithm}", container="speculators")
    family = find_mtp_family(config)
    promised = (family.layout.declared(config) if family else declared(config)).modules
    if promised:
        if family and family.layout.method == "dspark":
            block = as_size(nested_value(config, family.layout.requires))
            kind = _model_kind(config, MTP, "dspark", family.layout.title, promised)
            return replace(kind, block=block, max_drafts=block)
        return _model_kind(config, MTP, "mtp", f"{family.layout.title if family else 'native'} MTP", promised)
    if names is None and (bare := identify_bare(config)) is not None:
        return _described(bare, config)
    return _model_kind(config, MODEL, "draft_model", "draft model", 1)


def _described(found: DrafterFormat, config: Mapping[str, Any]) -> DrafterKind:
    sizes = Sizes(config)
    return DrafterKind(
        kind=found.key, method=found.method, title=found.title, format=found,
        container="speculators" if config.get("speculators_model_type") is not None else "safetensors",
        num_modules=found.num_parts(sizes), block=found.rows(sizes), max_drafts=found.drafts(sizes),
        hidden_size=sizes.get("target_hidden"), vocab_size=sizes.get("vocabulary"),
        draft_vocab_size=sizes.get("draft_vocabulary"),
    )  # fmt: skip


def _model_kind(config: Mapping[str, Any], kind: str, method: str, title: str, modules: int) -> DrafterKind:
    """The kind of a whole model, with or without MTP modules."""
    sizes = Sizes(config)
    hidden, vocabulary = sizes.get("hidden"), sizes.get("vocabulary")
    return DrafterKind(
        kind=kind, method=method, title=title, num_modules=modules, hidden_size=hidden, vocab_size=vocabulary
    )


def mtp_modules(count: int = 1) -> DrafterKind:
    """The kind of a model's native MTP modules."""
    return DrafterKind(kind=MTP, method="mtp", title=OTHERS[MTP], num_modules=count)


def classify_path(name: str | Path) -> DrafterKind:
    """The kind of a directory, .gguf file or Hub repo. Raises UsageError for others, ModelError for damaged files."""
    path = hub.resolve(str(name)) if hub.is_builtin(str(name)) else user_path(name)
    if gguf.detect(path):
        return _of_gguf(gguf.read_parts(path)[0])
    if path.is_dir() and (path / "config.json").exists():
        config = read_object(path / "config.json")
        return classify(config, _names(path) if any(path.glob("*.safetensors")) else None)
    if hub.is_repo(str(name)) and (repo := hub.repo_of(str(name))):
        from headstart.formats.remote import read_repo  # the Hub's client is slow to import

        found = read_repo(repo, no_progress)
        return classify(found.config, found.tensors or None) if isinstance(found, Checkpoint) else _of_gguf(found[0])
    raise UsageError(f"there is no drafter at {name}", "give a directory with config.json, a .gguf file or a repo id")


def _names(path: Path) -> Container[str] | None:
    """Names of a directory's tensors; None if they cannot be read, which loading reports later."""
    try:
        return find_checkpoint(path).tensors
    except ModelError:
        return None


def _of_gguf(file: GgufFile) -> DrafterKind:
    """The kind of a GGUF file, by its architecture and the metadata keys common to all architectures."""
    architecture = str(file.metadata.get("general.architecture", ""))

    def number(key: str) -> int | None:
        return as_size(file.metadata.get(f"{architecture}.{key}"))

    formats = published_formats()
    if found := next((each for each in formats if architecture in each.gguf), None):
        found = next((each for each in formats if each.gguf_marker and each.gguf_marker in file.tensors), found)
    modules, block = number("nextn_predict_layers"), number("block_size")
    kind, method = (MTP, "mtp") if modules else (MODEL, "draft_model")
    return DrafterKind(
        kind=found.key if found else kind, method=found.method if found else method,
        title=found.title if found else OTHERS[kind], format=found, container="gguf",
        num_modules=(number("block_count") if found else modules) or 1, block=block,
        max_drafts=max(1, block - int(found is not None and found.anchored)) if block else None,
        hidden_size=number("embedding_length"), vocab_size=number("vocab_size"),
    )  # fmt: skip
