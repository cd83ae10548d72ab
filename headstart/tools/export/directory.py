"""A Hugging Face directory as exporters see it: its config, and its tensors by their places in the files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headstart import hub
from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.formats.json_object import read_object
from headstart.formats.safetensors import whole_directory

WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


@dataclass(frozen=True)
class Directory:
    """`name`: what the user called it. Tensors are looked up when first asked for: ModelError for damaged files."""

    name: str
    path: Path
    config: Mapping[str, Any]

    @staticmethod
    def open(name: str | None) -> Directory:
        """By path, Hub name or alias. ModelError for what is no directory with a config.json."""
        path = hub.resolve(name)
        if not path.is_dir():
            hint = "give the Hugging Face directory (config.json and *.safetensors) it was made from"
            raise ModelError(f"{path} is a single file, but a directory is wanted", hint)
        return Directory(name or str(path), path, read_object(path / "config.json"))

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        return whole_directory(self.path)

    @property
    def title(self) -> str:
        """The last part of the name: a cached repo's folder is called by its commit."""
        return Path(self.name).name or self.path.resolve().name

    def side_files(self) -> dict[str, Path]:
        """Everything in the directory that holds no weights: tokenizer, templates, licence and so on."""
        return {
            path.name: path
            for path in sorted(self.path.iterdir())
            if path.is_file() and not path.name.endswith(WEIGHT_ENDINGS)
        }

    def other_weights(self) -> list[str]:
        """Weight files of other formats."""
        found = (path.name for path in sorted(self.path.iterdir()) if path.is_file())
        return [name for name in found if name.endswith(WEIGHT_ENDINGS[1:])]
