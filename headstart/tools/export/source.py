"""What every layout starts from: a checkpoint directory as it is, or a trunk and its head as arrays."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headstart import hub
from headstart.errors import ModelError
from headstart.formats import open_checkpoint
from headstart.formats.base import Checkpoint
from headstart.formats.json_object import read_object
from headstart.formats.safetensors import whole_directory
from headstart.heads.files import read_head
from headstart.heads.kind import HeadCheckpoint
from headstart.hub import Alias, resolve_alias
from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig
from headstart.models.tensors import canonical_tensors, find_family
from headstart.tools.export.plan import Plan

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def open_directory(name: str | None) -> Checkpoint:
    """A Hugging Face directory by path, Hub name or alias, with the tensors of all its files. Raises ModelError."""
    path = hub.resolve(name)
    if not path.is_dir():
        hint = "give the Hugging Face directory (config.json and *.safetensors) it was made from"
        raise ModelError(f"{path} is a single file, but a directory is wanted", hint)
    config = read_object(path / "config.json")
    return Checkpoint(path, "safetensors", config, whole_directory(path), canonical_names=False, name=name or "")


def side_files(folder: Path) -> dict[str, Path]:
    """Everything in a directory that holds no weights: tokenizer, templates, licence and so on."""
    files = (path for path in sorted(folder.iterdir()) if path.is_file())
    return {path.name: path for path in files if not path.name.endswith(WEIGHT_ENDINGS)}


def inner_files(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Files of its folders that hold no weights, and weights; hidden folders and links out of it are left out."""
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
    """Weight files of other formats."""
    names = (path.name for path in sorted(folder.iterdir()) if path.is_file())
    return [name for name in names if name.endswith(WEIGHT_ENDINGS[1:])]


@dataclass(frozen=True)
class Source:
    name: str
    checkpoint: Checkpoint
    sizes: DecoderConfig
    tensors: Mapping[str, RawTensor]  # of the trunk, canonical names
    head: HeadCheckpoint
    head_path: Path


@dataclass(frozen=True)
class Request:
    """What the user asked for. Both ways to read it raise ModelError when it is not there."""

    model: str | None
    head: Path | None = None
    model_type: str | None = None

    @cached_property
    def alias(self) -> Alias:
        return resolve_alias(self.model)

    @property
    def has_own_head(self) -> bool:
        """Is the head a directory of its own, not a part of the checkpoint?"""
        return self.head is not None or self.alias.head() is not None

    @cached_property
    def directory(self) -> Checkpoint:
        """The checkpoint's files."""
        if self.has_own_head:
            hint = "--to vllm-mimo makes one checkpoint of trunk and head; export that one"
            what = "is a directory of its own, but this layout is cut out of a checkpoint"
            raise ModelError(f"the head of {self.alias.name} {what}", hint)
        return open_directory(self.model)

    def source(self, kind: str) -> Source:
        """Trunk and head as arrays. Of several shipped heads the one of this kind."""
        head = self.head or self.alias.head(kind)
        if head is None:
            raise ModelError(f"{self.alias.name} has no head of its own directory", "give one with --head")
        checkpoint = open_checkpoint(self.alias.trunk)
        family = find_family(checkpoint)
        sizes = family.read(checkpoint.config, strict=False)
        tensors = canonical_tensors(checkpoint, family, sizes)
        return Source(self.alias.name, checkpoint, sizes, tensors, read_head(head), head)


Export = Callable[[Request], Plan]
"""What a target offers as `EXPORT`: what to write, decided and checked in full. Raises UsageError or ModelError."""


def text_side(source: Source) -> dict[str, str]:
    """Tokenizer and chat template: the files of a directory, or made from a GGUF file's own."""
    folder = source.checkpoint.path
    if folder.is_dir():
        return {name: (folder / name).read_text("utf-8") for name in TOKENIZER_FILES if (folder / name).exists()}
    tokenizer, template = source.checkpoint.load_tokenizer(), source.checkpoint.chat_template()
    ends = sorted(tokenizer.eos_ids)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if ends:
        config["eos_token"] = tokenizer.token_text(ends[0])
    if template is not None:
        config["chat_template"] = template.sources["default"]
    return {
        "tokenizer.json": tokenizer.to_json(),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        "generation_config.json": json.dumps({"eos_token_id": ends}) + "\n",
    }
