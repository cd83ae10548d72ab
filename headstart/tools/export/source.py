"""Input of every layout: a checkpoint directory, or a trunk and its head as arrays."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headstart import hub
from headstart.errors import ModelError
from headstart.formats import no_checkpoint, open_checkpoint
from headstart.formats.base import Checkpoint
from headstart.formats.json_object import read_object
from headstart.formats.safetensors import whole_directory
from headstart.heads.files import read_head
from headstart.heads.kind import HeadCheckpoint
from headstart.heads.published import refuse_head
from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig
from headstart.models.shipped_heads import choose_head, shipped_heads_at
from headstart.models.tensors import canonical_tensors, find_family
from headstart.tools.export.plan import TAKEN_OVER, Plan

WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def open_directory(name: str | None) -> Checkpoint:
    """Opens a Hugging Face directory by path, Hub name or alias. Raises ModelError for anything else."""
    path = hub.resolve(name)
    if not path.is_dir():
        hint = "give the Hugging Face directory (config.json and *.safetensors) it was made from"
        raise ModelError(f"{path} is a single file, but a directory is needed", hint)
    if not (path / "config.json").exists():
        raise no_checkpoint(path)
    config = read_object(path / "config.json")
    refuse_head(config, path)
    return Checkpoint(path, "safetensors", config, whole_directory(path), canonical_names=False, name=name or "")


def side_files(folder: Path) -> dict[str, Path]:
    """Returns the files of a directory that are not weights: tokenizer, templates, licence and so on."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file())
    return {path.name: path for path in files if not path.name.endswith(WEIGHT_ENDINGS)}


def inner_files(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Returns the files in subfolders that are not weights, and the names of weight files there. Hidden folders and
    links to outside are left out."""
    files, weights = {}, []
    for path in sorted(folder.glob("*/**/*")):
        name, is_inside = path.relative_to(folder), path.parent.resolve().is_relative_to(folder.resolve())
        if path.is_file() and not any(part.startswith(".") for part in name.parts) and is_inside:
            if path.name.endswith(WEIGHT_ENDINGS):
                weights.append(str(name))
            else:
                files[str(name)] = path
    return files, weights


def other_weights(folder: Path) -> list[str]:
    """Returns the names of weight files in other formats than safetensors."""
    names = (path.name for path in sorted(folder.iterdir()) if path.is_file())
    return [name for name in names if name.endswith(WEIGHT_ENDINGS[1:])]


@dataclass(frozen=True)
class ExportSource:
    name: str
    checkpoint: Checkpoint
    sizes: DecoderConfig
    tensors: Mapping[str, RawTensor]  # of the trunk, canonical names
    head: HeadCheckpoint
    head_path: Path

    @cached_property
    def head_tensors(self) -> Mapping[str, RawTensor]:
        """The head's tensors, canonical names. A head without an LM head gets the trunk's rows of its draft tokens."""
        tensors, ids = dict(self.head.tensors), self.head.draft_token_ids
        if ids is not None and "lm_head.weight" not in tensors:
            rows = self.tensors.get("lm_head.weight", self.tensors["embed_tokens.weight"])
            tensors["lm_head.weight"] = rows.take_rows(ids)
        return tensors


@dataclass(frozen=True)
class ExportRequest:
    """The user's model and head. `directory` and `source` read them in two ways; both raise ModelError."""

    model: str | None
    head: Path | None = None
    model_type: str | None = None
    slice: str | None = None

    @property
    def name(self) -> str:
        return self.model or hub.DEFAULT_MODEL

    @cached_property
    def path(self) -> Path:
        return hub.resolve(self.model)

    @cached_property
    def _shipped(self) -> Mapping[str, Path]:
        return shipped_heads_at(self.path)

    def find_head(self, kind: str | None = None) -> Path | None:
        """The directory of the user's head, else of the head in this package, of this kind if there is one."""
        return self.head or choose_head(self._shipped, kind)

    @property
    def has_own_head(self) -> bool:
        """Whether the head is a separate directory, not a part of the checkpoint."""
        return self.find_head() is not None

    @cached_property
    def directory(self) -> Checkpoint:
        """The checkpoint's files, for a head inside the checkpoint."""
        if self.has_own_head:
            hint = "--to vllm-mimo makes one checkpoint of trunk and head; export that one"
            what = "is a separate directory, but this layout needs a head inside the checkpoint"
            raise ModelError(f"the head of {self.name} {what}", hint)
        return open_directory(self.model)

    def source(self, kind: str) -> ExportSource:
        """Returns trunk and separate head as arrays; of several shipped heads the one of this kind."""
        head = self.find_head(kind)
        if head is None:
            raise ModelError(f"{self.name} has no separate head", "give one with --head")
        checkpoint = open_checkpoint(self.path)
        family = find_family(checkpoint)
        sizes = family.read(checkpoint.config, strict=False)
        tensors = canonical_tensors(checkpoint, family, sizes)
        return ExportSource(self.name, checkpoint, sizes, tensors, read_head(head), head)


Export = Callable[[ExportRequest], Plan]
"""Type of a target's `EXPORT`: makes the complete, checked plan. Raises UsageError or ModelError."""


def add_text_side(plan: Plan, source: ExportSource) -> None:
    """Adds tokenizer, chat templates and generation settings to a plan: files of a directory, or texts made from a GGUF
    file's metadata."""
    folder = source.checkpoint.path
    if folder.is_dir():
        files = [*(folder / name for name in TAKEN_OVER), *sorted(folder.glob("additional_chat_templates/*.jinja"))]
        plan.copies |= {str(file.relative_to(folder)): file for file in files if file.exists()}
        return
    tokenizer, template = source.checkpoint.load_tokenizer(), source.checkpoint.chat_template()
    ends = sorted(tokenizer.eos_ids)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if ends:
        config["eos_token"] = tokenizer.token_text(ends[0])
    if template is not None:
        named = [{"name": name, "template": text} for name, text in template.sources.items()]
        config["chat_template"] = named if len(named) > 1 else named[0]["template"]
    plan.texts |= {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps({"eos_token_id": ends}) + "\n",
    }
